"""`WorkerHarness` with batch handlers: they crash and stall like others."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Literal

import pytest

from integr8s_idem import BaseEvent, EventRouter, Service, Settings
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.testing import WorkerHarness


class Indexed(BaseEvent):
    event_type: Literal["indexed"] = "indexed"
    number: int


router = EventRouter()
indexed: list[int] = []
harnesses: list[WorkerHarness] = []


@router.on_batch(Indexed, max_size=10, max_wait=timedelta(milliseconds=20))
async def index(events: list[Indexed]) -> None:
    await harnesses[0].reached("started")
    await asyncio.sleep(0)
    indexed.extend(event.number for event in events)


SETTINGS = Settings.model_validate({"services": {"search": {"ordering": "none"}}})
search = Service("search", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])


@pytest.fixture
def harness() -> WorkerHarness:
    indexed.clear()
    harnesses[:] = [WorkerHarness(search, settings=SETTINGS)]
    return harnesses[0]


@pytest.mark.parametrize(
    ("point", "times"),
    [("before_handler", 1), ("started", 1), ("after_handler", 2)],
)
async def test_a_batch_handler_takes_no_step_after_a_crash(harness: WorkerHarness, point: str, times: int) -> None:
    async with harness:
        harness.crash_at(point)
        await harness.publish(*(Indexed(number=number) for number in range(3)))

    assert sorted(indexed) == sorted([0, 1, 2] * times)


async def test_a_stalled_batch_handler_is_taken_over(harness: WorkerHarness) -> None:
    async with harness:
        harness.stall_at("started")
        await harness.publish(*(Indexed(number=number) for number in range(3)))

        assert {record.attempt for record in await harness.records()} == {2}
