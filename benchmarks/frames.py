"""How many Python calls, allocations and bytes does a guarded event take, regardless of the load of the machine?

A worker handles messages that were fetched earlier, on a real Redis: with a no-op handler for calls and allocations,
and with handlers that all wait at the same time for bytes. The first two are the count of many events minus that of
few, divided by the difference in events, so that starting and stopping do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias

import memray
from aiokafka import ConsumerRecord, TopicPartition

from benchmarks.contestants import ensure
from benchmarks.kafka import (
    BY_PARTITION,
    NOOP,
    PARTITIONS,
    Fetched,
    Handler,
    OrderPlaced,
    after_fetching,
    new_scope,
    router_of,
)
from benchmarks.measuring import Flat
from benchmarks.places import RedisEnvironment, redis_environment
from benchmarks.rounds import Options, Progress
from benchmarks.stages import Log, Record
from integr8s_idem import EventDispatcher, EventPublisher, IdempotentEventDispatcher
from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.worker import ServiceWorker

FEW: Final = 2_000
MANY: Final = 10_000
WAITING: Final = ServiceSettings(ordering="none", concurrency=2_000, max_in_flight=4_000)
"""For handlers that all wait at the same time."""
MOST_SHOWN: Final = 200

Records: TypeAlias = Mapping[TopicPartition, list[Record]]
Calls: TypeAlias = Counter[tuple[str, str]]
"""Calls by file and function; each step of a coroutine is a call."""


def records_of(events: int) -> Records:
    """Make the messages of `events` events, in partitions, as a consumer fetches them."""
    found: dict[TopicPartition, list[Record]] = {TopicPartition("orders", number): [] for number in range(PARTITIONS)}
    for number in range(events):
        event = OrderPlaced(order_id=f"order-{number}", customer_id=f"customer-{number}", total_cents=100 + number)
        partition = TopicPartition("orders", number % PARTITIONS)
        value, headers, offset = encode_event(event), tuple(event_headers(event)), len(found[partition])
        found[partition].append(
            ConsumerRecord("orders", partition.partition, offset, 0, 0, b"key", value, None, 3, len(value), headers)
        )
    return found


class Services:
    """Services without a broker."""

    def __init__(self, env: RedisEnvironment) -> None:
        self._env = env

    async def handle(
        self,
        records: Records,
        service: ServiceSettings,
        *,
        guarded: bool = True,
        handler: Handler | None = None,
        after_fetch: Callable[[Fetched], Awaitable[None]] | None = None,
    ) -> None:
        """Let a worker handle all messages.

        Args:
            handler: One that does nothing if not given.
            after_fetch: Awaited with messages before they are handled.
        """
        events = sum(map(len, records.values()))
        handler = handler or Handler(events)
        async with self._worker(handler, records, service, guarded=guarded, after_fetch=after_fetch) as worker:
            await handler.wait()
            tally = worker.report().tally
            while tally.handled < events:  # noqa: ASYNC110  # a tally has no event to wait for
                await asyncio.sleep(0)
            ensure(handler.handled == events and not tally.duplicates, f"{handler.handled} handled, {tally}")

    async def bytes_in_flight(self, records: Records, *, guarded: bool = True) -> float:
        """Return the bytes that each event takes while its handler waits, without its message."""
        waiting = Waiting(sum(map(len, records.values())))
        with traced():
            async with self._worker(waiting, records, WAITING, guarded=guarded):
                return await waiting.bytes_per_event()

    @asynccontextmanager
    async def _worker(
        self,
        handler: Handler,
        records: Records,
        service: ServiceSettings,
        *,
        guarded: bool,
        after_fetch: Callable[[Fetched], Awaitable[None]] | None = None,
    ) -> AsyncIterator[ServiceWorker]:
        settings, router = KafkaSettings(retention_check="off"), router_of(handler)
        publisher = EventPublisher(settings)
        manager = await self._env.manager(new_scope())
        dispatcher = IdempotentEventDispatcher(router, manager) if guarded else EventDispatcher(router, scope="bench")
        log = Log(records) if after_fetch is None else after_fetching(Log(records), after_fetch)
        worker = ServiceWorker(
            "bench", dispatcher, publisher, settings, service, group="bench", consumer=lambda *_: log
        )
        task = asyncio.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()
            await task
            await manager.close()


class Waiting(Handler):
    """Waits in all handlers until the gate opens."""

    def __init__(self, events: int) -> None:
        super().__init__(events)
        self.events = events
        self.gate = asyncio.Event()

    async def handle(self, event: OrderPlaced) -> None:
        await super().handle(event)
        await self.gate.wait()

    async def bytes_per_event(self) -> float:
        """Return the memory that is traced until all handlers wait, and let them go on."""
        before, _ = tracemalloc.get_traced_memory()
        await self.wait()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        self.gate.set()
        return (after - before) / self.events


@contextmanager
def traced() -> Iterator[None]:
    """Trace the memory that the block allocates."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def bytes_by_hand(records: Records) -> float:
    """Return the bytes of an event that pydantic decodes, while its handler waits in a task of its own."""
    messages = [record.value or b"" for found in records.values() for record in found]
    waiting = Waiting(len(messages))

    async def handle_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for message in messages:
                tasks.create_task(waiting.handle(OrderPlaced.model_validate_json(message)))

    with traced():
        handling = asyncio.create_task(handle_all())
        found = await waiting.bytes_per_event()
        await handling
    return found


async def count_calls(run: Awaitable[None]) -> Calls:
    """Count the calls of Python functions, and the steps of coroutines."""
    calls: Calls = Counter()

    def on_event(frame: Any, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    sys.setprofile(on_event)
    try:
        await run
    finally:
        sys.setprofile(None)
    return calls


async def count_allocations(run: Awaitable[None]) -> int:
    """Count the allocations of Python's allocators; reused objects of free lists do not count."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "allocations"
        with memray.Tracker(file, trace_python_allocators=True):
            await run
        # Releases are records as well, with a size of 0.
        return sum(each.size > 0 for each in memray.FileReader(file).get_allocation_records())


async def calls_per_event(services: Services, service: ServiceSettings, *, guarded: bool = True) -> Calls:
    """Return the calls of a thousand events."""
    few, many = [
        await count_calls(services.handle(records_of(events), service, guarded=guarded)) for events in (FEW, MANY)
    ]
    return Counter({where: round((many[where] - few[where]) / (MANY - FEW) * 1_000) for where in many})


async def _allocations(services: Services, *, guarded: bool) -> float:
    few, many = [
        await count_allocations(services.handle(records_of(events), NOOP, guarded=guarded)) for events in (1_000, FEW)
    ]
    return (many - few) / (FEW - 1_000)


async def measure(_: Options, progress: Progress) -> Flat:
    """Count once: the counts of two runs differ by less than a hundredth."""
    async with redis_environment() as env:
        services = Services(env)
        await services.handle(records_of(FEW), NOOP)  # fills the caches
        results: Flat = {}
        kinds = (("", NOOP, True), ("by_partition.", BY_PARTITION, True), ("plain.", NOOP, False))
        for name, service, guarded in kinds:
            found = await calls_per_event(services, service, guarded=guarded)
            results[f"frames.{name}calls"] = round(found.total() / 1_000, 1)
        for name, guarded in (("", True), ("plain.", False)):
            results[f"frames.{name}allocations"] = round(await _allocations(services, guarded=guarded), 1)
            in_flight = await services.bytes_in_flight(records_of(WAITING.concurrency), guarded=guarded)
            results[f"frames.{name}bytes_in_flight"] = round(in_flight)
        results["frames.by_hand.bytes_in_flight"] = round(await bytes_by_hand(records_of(WAITING.concurrency)))
    progress(", ".join(f"{name} {value}" for name, value in results.items()))
    return results


async def _show(service: ServiceSettings, *, guarded: bool) -> None:
    async with redis_environment() as env:
        services = Services(env)
        await services.handle(records_of(FEW), service, guarded=guarded)
        calls = await calls_per_event(services, service, guarded=guarded)
    print(f"{calls.total() / 1_000:.1f} calls per event")
    for (file, function), number in calls.most_common(MOST_SHOWN):
        print(f"{number / 1_000:6.2f}  {Path(file).parent.name}/{Path(file).name}  {function}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frames", description="Show the calls per event.")
    parser.add_argument("--by-partition", action="store_true", help='with `ordering = "partition"`')
    parser.add_argument("--plain", action="store_true", help="without the guard")
    arguments = parser.parse_args()
    asyncio.run(_show(BY_PARTITION if arguments.by_partition else NOOP, guarded=not arguments.plain))


if __name__ == "__main__":
    main()
