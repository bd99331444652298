"""The runs of a batch of messages: outcomes whose task is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.engine.work import Work
from integr8s_idem.errors import PermanentError
from integr8s_idem.integrations.message_runs import MessageRuns
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import guarded

KEYS = ("order:1", "order:2", "order:3")


@pytest.mark.parametrize("steps", range(20))
@virtual_time
async def test_a_batch_that_is_cancelled_at_any_step_while_the_store_fails_is_recorded(steps: int) -> None:
    here = guarded()
    here.store.down = {"complete"}

    async def handle() -> None:
        runs = MessageRuns(here.manager)
        await runs.begin_all([(Work(Key.of(key)), object()) for key in KEYS])
        runs.start()
        handled.set()
        await runs.finish(None)

    handled = asyncio.Event()
    handling = asyncio.create_task(handle())
    await handled.wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    handling.cancel()
    await asyncio.wait({handling})
    here.store.down = set()
    await here.manager.close()

    assert handling.cancelled()
    assert [(await here.record(key)).status for key in KEYS] == [IdempotencyStatus.COMPLETED] * len(KEYS)


@pytest.mark.parametrize("steps", range(20))
@virtual_time
async def test_a_batch_that_is_cancelled_at_any_step_while_its_failure_is_recorded_has_failed(steps: int) -> None:
    here, failing = guarded(), asyncio.Event()

    async def handle() -> None:
        runs = MessageRuns(here.manager)
        await runs.begin_all([(Work(Key.of(key)), object()) for key in KEYS])
        runs.start()
        failing.set()
        await runs.fail(PermanentError("no such account"))

    here.store.down = {"fail"}
    handling = asyncio.create_task(handle())
    await failing.wait()
    for _ in range(steps):
        await asyncio.sleep(0)
    handling.cancel()
    await asyncio.wait({handling})
    here.store.down = set()
    await here.manager.close()

    assert handling.cancelled()
    assert [(await here.record(key)).status for key in KEYS] == [IdempotencyStatus.FAILED] * len(KEYS)
