"""The loop of docs/how-to/handle-batches.md when work raises, or another worker takes it over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition

from integr8s_idem.records import IdempotencyStatus, Reserved
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.batch_loop import one_batch
from tests.support.fake_consumer import FakeRecord
from tests.support.guarded import LEASE, Guarded, guarded


class Consumer:
    """Three records of one partition."""

    def __init__(self) -> None:
        self.committed: dict[TopicPartition, int] = {}
        self.sought: list[int] = []

    async def getmany(self, **_: object) -> dict[TopicPartition, list[FakeRecord]]:
        headers = [[("event_id", f"{offset}".encode())] for offset in range(3)]
        return {TopicPartition("orders", 0): [FakeRecord("orders", 0, i, None, b"", headers[i]) for i in range(3)]}

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        self.committed |= offsets

    def seek(self, _: TopicPartition, offset: int) -> None:
        self.sought.append(offset)


async def lease_of(here: Guarded, key: str) -> Any:
    record = await here.manager.get(key)
    assert record is not None
    return record.status, record.lease_until is not None


async def test_an_error_completes_finished_records_and_releases_the_rest() -> None:
    here, consumer = guarded(), Consumer()

    async def index(record: Any, _: Reserved) -> bool:
        if record.offset == 1:
            raise OSError("the index is full")
        return True

    with pytest.raises(OSError, match="the index is full"):
        await one_batch(consumer, here.manager, index)

    assert await lease_of(here, "0") == (IdempotencyStatus.COMPLETED, False)
    assert [await lease_of(here, key) for key in ("1", "2")] == [(IdempotencyStatus.PROCESSING, False)] * 2
    assert consumer.committed == {}


@virtual_time
async def test_work_taken_over_by_another_worker_does_not_start() -> None:
    here, consumer, started = guarded(), Consumer(), list[int]()

    async def index(record: Any, _: Reserved) -> bool:
        started.append(record.offset)
        if record.offset == 0:
            await asyncio.sleep(LEASE + 1)
            assert isinstance(await guarded(here.store).manager.reserve("1"), Reserved)
        return True

    await one_batch(consumer, here.manager, index)

    assert started == [0, 2]
    assert consumer.sought == [1]
