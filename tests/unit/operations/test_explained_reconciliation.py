"""`keys explain` of events whose handler has a reconcile function."""

from __future__ import annotations

from typing import Literal

import pytest

from integr8s_idem import BaseEvent, EventRouter, IdempotencyConfig, IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.config import Settings
from integr8s_idem.events import EventDecoder
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.operations.keys.explainer import Explainer
from integr8s_idem.operations.keys.open_services import OpenService
from integr8s_idem.reconciliation import Answer, Unknown

EVENT_ID = "0192-a"


class Placed(BaseEvent):
    event_type: Literal["placed"] = "placed"


async def find(event: Placed) -> Answer:
    return Unknown(60, "the bank has not answered")


async def fail(event: Placed) -> None:
    raise ConnectionError


async def explained(*, reconciles: bool, attempts: int, max_attempts: int = 3) -> str:
    """Make attempts at an event, and return what is said about its next delivery."""
    router, settings = EventRouter(), Settings(idempotency=IdempotencyConfig(max_attempts=max_attempts))
    router.on(Placed, name="charge", reconcile=find if reconciles else None)(fail)
    repository = MemoryIdempotencyRepository()
    manager = IdempotencyManager(settings.idempotency, repository, scope="billing")
    dispatcher = IdempotentEventDispatcher(router, manager)
    for _ in range(attempts):
        await dispatcher.dispatch(Placed(event_id=EVENT_ID))
    service = OpenService("billing", "billing", ("placed",), dispatcher, EventDecoder([Placed]))
    answer = await Explainer(settings, repository, [service]).explain(EVENT_ID)
    [record] = answer.records
    return record.next_delivery


async def test_the_next_attempt_asks_first() -> None:
    plain, asking = await explained(reconciles=False, attempts=1), await explained(reconciles=True, attempts=1)

    assert "reconcile" not in plain
    assert asking == (
        "would be handled again, as attempt 2, unless its reconcile function finds that an earlier attempt has had its "
        "effect"
    )


async def test_a_last_attempt_is_still_announced_as_such() -> None:
    assert (await explained(reconciles=True, attempts=2)).endswith("; a failure would be final (max_attempts = 3)")


@pytest.mark.parametrize("reconciles", [True, False])
async def test_work_that_has_failed_says_whether_its_outcome_is_unknown(reconciles: bool) -> None:
    text = await explained(reconciles=reconciles, attempts=3)

    assert ("nobody could tell whether its effect has happened" in text) is reconciles
    assert text.endswith("after its reconcile function has been asked") is reconciles
