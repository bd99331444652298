"""Processes within the event loop of a test, and the broker in memory that they meet at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from aiokafka import ConsumerRebalanceListener
from aiokafka.errors import CommitFailedError

from integr8s_idem.testing.memory_broker import MemoryBroker, MemoryConsumer
from integr8s_idem.testing.simulated_processes import Process, processes_in_loop
from integr8s_idem.worker.kafka_protocols import Partition


@pytest.fixture
async def process() -> Process:
    return Process("billing 1")


@pytest.fixture
async def _steered() -> Iterator[None]:  # type: ignore[misc]  # it is async, so that it is on the loop of the test
    with processes_in_loop():
        yield


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("_steered")
class TestProcess:
    async def test_the_dead_take_no_step_though_what_they_wait_for_has_come(self, process: Process) -> None:
        steps, awaited = [], asyncio.Event()

        async def work() -> None:
            try:
                await awaited.wait()
                steps.append("went on")
            finally:
                steps.append("finally")

        process.start(work())
        await turns()
        process.die()
        awaited.set()
        await turns()
        before_burial = list(steps)
        await process.bury()

        assert (before_burial, steps) == ([], ["finally"])

    async def test_tasks_that_a_process_has_begun_share_its_fate(self, process: Process) -> None:
        steps = []

        async def child() -> None:
            await asyncio.sleep(0)
            steps.append("child")

        async def work() -> None:
            begun = asyncio.create_task(child())
            process.die()
            await begun

        process.start(work())
        await turns()
        seen = list(steps)
        await process.bury()

        assert seen == []

    async def test_what_is_stalled_goes_on_where_it_stood(self, process: Process) -> None:
        awaited = asyncio.Event()

        async def work() -> str:
            await awaited.wait()
            return "done"

        task = process.start(work())
        await turns()
        process.stall()
        awaited.set()
        await turns()
        stood = not task.done()
        process.resume()

        assert stood
        assert await task == "done"

    async def test_a_cancellation_reaches_a_stalled_process_when_it_goes_on(self, process: Process) -> None:
        heard = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                heard.append("cancelled")
                raise

        task = process.start(work())
        await turns()
        process.stall()
        task.cancel()
        await turns()
        too_early = list(heard)
        process.resume()
        await turns()

        assert (too_early, heard, task.cancelled()) == ([], ["cancelled"], True)

    async def test_a_burial_ends_what_waits_for_ever_and_what_does_not_want_to_end(self, process: Process) -> None:
        async def stubborn() -> None:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue

        tasks = [process.start(stubborn()), process.start(asyncio.Event().wait())]
        await turns()
        process.die()
        await process.bury()

        assert all(task.cancelled() for task in tasks)
        assert process.tasks == []

    async def test_tasks_of_the_test_itself_are_left_alone(self, process: Process) -> None:
        process.die()

        assert await asyncio.create_task(asyncio.sleep(0, "done")) == "done"


class Listener(ConsumerRebalanceListener):
    async def on_partitions_revoked(self, revoked: object) -> None: ...
    async def on_partitions_assigned(self, assigned: object) -> None: ...


async def joined(broker: MemoryBroker) -> MemoryConsumer:
    consumer = MemoryConsumer(broker, "billing")
    consumer.subscribe(["placed"], listener=Listener())
    await consumer.start()
    return consumer


async def test_whoever_is_out_of_the_group_commits_and_fetches_nothing() -> None:
    broker, at = MemoryBroker(lambda: 0), Partition("placed", 0)
    first = await joined(broker)
    second = await joined(broker)
    broker.append("placed", None, b"{}", ())

    with pytest.raises(CommitFailedError):
        await first.commit({at: 1})
    fetched = await second.getmany(timeout_ms=0, max_records=10)

    assert not first.is_member
    assert broker.group("billing").committed == {}
    assert [message.value for message in fetched[at]] == [b"{}"]
