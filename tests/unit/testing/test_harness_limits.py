"""`WorkerHarness`: how long it waits until everything is settled."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Literal

import pytest

from integr8s_idem import BaseEvent, EventRouter, RetryAfter, Service, Settings
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.testing import NotSettledError, WorkerHarness

SETTINGS = Settings()
released = asyncio.Event()


class Counted(BaseEvent):
    event_type: Literal["counted"] = "counted"


class Stuck(BaseEvent):
    event_type: Literal["stuck"] = "stuck"


router = EventRouter()


@router.on(Counted)
async def count(event: Counted) -> None:
    raise RetryAfter(timedelta(minutes=2), "the warehouse counts its stock")


@router.on(Stuck)
async def wait_for_the_test(event: Stuck) -> None:
    await released.wait()


stock = Service("stock", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])


async def test_the_error_names_the_limit_of_simulated_time_and_how_to_pass_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("integr8s_idem.testing.harness_run.SIMULATED_LIMIT_SECONDS", 60.0)

    async with WorkerHarness(stock, settings=SETTINGS) as harness:
        with pytest.raises(NotSettledError) as caught:
            await harness.publish(Counted())

    assert str(caught.value).startswith("not settled after 60 simulated seconds, the limit of settled(): stock 1 is ")
    assert "If an event waits for a longer pause, pass it with `await harness.advance(seconds)`" in str(caught.value)
    assert "stock 1" in caught.value.still_open


async def test_advance_passes_a_pause_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.testing.harness_run.SIMULATED_LIMIT_SECONDS", 60.0)

    async with WorkerHarness(stock, settings=SETTINGS) as harness:
        harness.send(Counted())
        await harness.advance(seconds=150)

        assert harness.attempts == [1, 2]


async def test_the_error_names_the_limit_of_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.testing.harness_run.REAL_LIMIT_SECONDS", 0.2)

    async with WorkerHarness(stock, settings=SETTINGS) as harness:
        with pytest.raises(NotSettledError, match=r"^not settled after 0\.2 seconds of real time, .*1 running"):
            await harness.publish(Stuck())
        released.set()
