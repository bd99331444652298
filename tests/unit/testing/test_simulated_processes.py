"""Simulated processes in an event loop, and the in-memory broker that they share."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from contextvars import Context

import pytest
from aiokafka import ConsumerRebalanceListener
from aiokafka.errors import CommitFailedError

from integr8s_idem.testing.memory_broker import MemoryBroker, MemoryConsumer
from integr8s_idem.testing.simulated_processes import Process, current_process, processes_in_loop
from integr8s_idem.worker.kafka_protocols import Partition


@pytest.fixture
async def process() -> Process:
    return Process("billing 1")


@pytest.fixture
async def _steered() -> Iterator[None]:  # type: ignore[misc]  # async, so that it runs on the loop of the test
    with processes_in_loop():
        yield


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.usefixtures("_steered")
class TestProcess:
    async def test_a_dead_process_takes_no_step_after_its_wait_ends(self, process: Process) -> None:
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

    async def test_tasks_with_a_context_of_their_own_die_with_it(self, process: Process) -> None:
        steps, awaited = [], asyncio.Event()

        async def child() -> None:
            await awaited.wait()
            steps.append(current_process())

        async def work() -> None:
            await asyncio.get_running_loop().create_task(child(), context=Context())

        process.start(work())
        await turns()
        process.die()
        awaited.set()
        await turns()
        await process.bury()

        assert steps == []

    async def test_tasks_of_a_process_die_with_it(self, process: Process) -> None:
        steps = []

        async def child() -> None:
            await asyncio.sleep(0)
            steps.append("child")

        async def work() -> None:
            started = asyncio.create_task(child())
            process.die()
            await started

        process.start(work())
        await turns()
        seen = list(steps)
        await process.bury()

        assert seen == []

    @pytest.mark.parametrize("state", ["running", "stalled", "dead"])
    async def test_a_task_that_is_cancelled_before_its_first_step_leaves_no_warning(
        self, process: Process, state: str
    ) -> None:
        async def work() -> None:
            raise AssertionError("never started")

        task = process.start(work())
        if state != "running":
            getattr(process, {"stalled": "stall", "dead": "die"}[state])()
        task.cancel()
        await process.bury()

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            del task
            gc.collect()

        assert [str(warning.message) for warning in warned] == []

    async def test_a_stalled_process_continues_where_it_stopped(self, process: Process) -> None:
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

    async def test_a_cancellation_reaches_a_stalled_process_when_it_continues(self, process: Process) -> None:
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

    async def test_bury_ends_endless_waits_and_stubborn_coroutines(self, process: Process) -> None:
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

    async def test_tasks_of_the_test_itself_are_not_affected(self, process: Process) -> None:
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


async def test_a_consumer_that_lost_its_membership_cannot_commit_or_fetch() -> None:
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
