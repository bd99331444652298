"""The stages of handling an event, each measured alone: the components of a service, called one after the other.

Events are processed in batches as large as those of the worker, so that each stage costs the same as in a service.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aiokafka import ConsumerRecord, TopicPartition
from dishka import AsyncContainer, FromDishka, Provider, Scope, make_async_container, provide

from benchmarks.contestants import ensure
from benchmarks.kafka import POLL_RECORDS, Handler, OrderPlaced, Topic, new_scope, router_of
from integr8s_idem import (
    EventDispatcher,
    EventRouter,
    IdempotencyConfig,
    IdempotencyManager,
    IdempotentEventDispatcher,
    Settings,
)
from integr8s_idem.engine.run import Returned, RunOptions
from integr8s_idem.engine.work import Attempt
from integr8s_idem.events import BaseEvent, EventDecoder
from integr8s_idem.handlers.dispatcher import HandlerExecution
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.records import Completion, Reserved, ReserveRequest, Verdict
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.worker.batch_limits import MOST_TOGETHER
from integr8s_idem.worker.consumer import make_consumer

COMMITS: Final = 50

Record: TypeAlias = ConsumerRecord[Any, Any]

Costs: TypeAlias = dict[str, float]
"""Microseconds of CPU in this process per event, by stage."""


@dataclass
class Clocks:
    """CPU time by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the CPU time of the block to a stage."""
        before = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - before

    def us(self, events: int) -> Costs:
        return {f"{name}_us": seconds / events * 1e6 for name, seconds in self.seconds.items()}


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the garbage collector, whose time depends on all live objects; it is measured in whole services."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def collector() -> Iterator[Clocks]:
    """Measure the CPU time of the garbage collector in the block, as the stage `gc`."""
    clocks, before = Clocks({"gc": 0.0}), 0.0

    def on_collection(phase: str, _: Mapping[str, int]) -> None:
        nonlocal before
        if phase == "start":
            before = time.thread_time()
        else:
            clocks.seconds["gc"] += time.thread_time() - before

    gc.callbacks.append(on_collection)
    try:
        yield clocks
    finally:
        gc.callbacks.remove(on_collection)


class FreeStore(MemoryIdempotencyRepository):
    """A store that reserves and completes everything and stores nothing, to exclude the cost of a store."""

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        return [
            Reserved(key=request.key, token=request.token, attempt=1, fence=1, lease=request.lease)
            for request in requests
        ]

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return [True] * len(completions)


class Log:
    """A consumer of messages fetched earlier, to exclude the cost of fetching."""

    def __init__(self, records: Mapping[TopicPartition, Sequence[Record]]) -> None:
        self._records = records
        self._positions = dict.fromkeys(records, 0)
        self._paused: set[Any] = set()
        self._listener: Any = None

    def subscribe(self, _: Sequence[str], *, listener: Any) -> None:
        self._listener = listener

    async def start(self) -> None:
        await self._listener.on_partitions_assigned(set(self._records))

    async def stop(self) -> None:
        await self._listener.on_partitions_revoked(set(self._records))

    async def getmany(self, *only: Any, timeout_ms: int, max_records: int) -> dict[Any, Sequence[Record]]:
        """Return messages of one partition at a time, as a fetch does."""
        for partition, position in self._positions.items():
            if partition in self._paused or (only and partition not in only):
                continue
            if found := self._records[partition][position : position + max_records]:
                self._positions[partition] = position + len(found)
                await asyncio.sleep(0)
                return {partition: found}
        await asyncio.sleep(timeout_ms / 1000)
        return {}

    async def commit(self, offsets: Mapping[Any, int]) -> None: ...

    async def position(self, partition: Any) -> int:
        return self._positions[partition]

    def seek(self, partition: Any, offset: int) -> None:
        raise AssertionError("seek is not expected: no event fails")

    def pause(self, *partitions: Any) -> None:
        self._paused.update(partitions)

    def resume(self, *partitions: Any) -> None:
        self._paused.difference_update(partitions)

    def assignment(self) -> set[Any]:
        return set(self._records)

    def highwater(self, partition: Any) -> int | None:
        return len(self._records[partition])

    async def end_offsets(self, partitions: Sequence[Any]) -> Mapping[Any, int]:
        return {partition: len(self._records[partition]) for partition in partitions}


class UnitOfWork:
    """A dependency in REQUEST scope, as handlers often have one."""


class _UnitOfWorkProvider(Provider):
    @provide(scope=Scope.REQUEST)
    async def unit(self) -> AsyncGenerator[UnitOfWork, None]:
        yield UnitOfWork()


@asynccontextmanager
async def scoped(handler: Handler) -> AsyncGenerator[tuple[EventRouter, Invoke], None]:
    """Create a handler with a dependency in REQUEST scope, and the function that calls it through Dishka."""
    router = EventRouter()

    @router.on(OrderPlaced)
    async def ship(event: OrderPlaced, unit: FromDishka[UnitOfWork]) -> None:
        assert unit is not None
        await handler.handle(event)

    provider = IdempotentDispatcherProvider(router)
    context = {Settings: Settings(), ServiceName: ServiceName("bench")}
    container: AsyncContainer = make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        _UnitOfWorkProvider(),
        provider,
        IdempotencyProvider(),
        KafkaProvider(),
        context=context,
    )
    try:
        yield router, provider.invoker(container)
    finally:
        await container.close()


async def fetch_all(topic: Topic) -> tuple[Costs, dict[TopicPartition, list[Record]]]:
    """Fetch all messages of `topic`; return the costs of fetching and committing, and the messages."""
    clocks, found, remaining = Clocks(), dict[TopicPartition, list[Record]](), topic.events
    consumer: Any = make_consumer(topic.settings, new_scope())
    consumer.subscribe([topic.name])
    await consumer.start()
    try:
        # As for a whole service, time is measured from the first messages on.
        while not (batches := await consumer.getmany(timeout_ms=200, max_records=POLL_RECORDS)):
            pass
        with without_collector(), clocks.stage("fetch"):
            while True:
                for partition, records in batches.items():
                    found.setdefault(partition, []).extend(records)
                    remaining -= len(records)
                if remaining <= 0:
                    break
                batches = await consumer.getmany(timeout_ms=200, max_records=POLL_RECORDS)
        offsets = {partition: records[-1].offset + 1 for partition, records in found.items()}
        before = time.process_time()
        for _ in range(COMMITS):
            await consumer.commit(offsets)
        commit = (time.process_time() - before) / COMMITS * 1e6
    finally:
        await consumer.stop()
    return {**clocks.us(topic.events), "commit_call_us": commit}, found


class Stages:
    """The stages between fetching and committing."""

    def __init__(self, records: Mapping[TopicPartition, Sequence[Record]]) -> None:
        self._records = [record for part in records.values() for record in part]

    async def run(self, repository: IdempotencyRepository) -> Costs:
        """Process all records in batches, stage by stage."""
        clocks, handler = Clocks(), Handler(len(self._records))
        manager = IdempotencyManager(IdempotencyConfig(), repository, scope=new_scope())
        dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
        decoder = EventDecoder(dispatcher.router.events)
        try:
            async with scoped(handler) as (router, invoke):
                in_scope = IdempotentEventDispatcher(router, manager, invoke=invoke)
                for start in range(0, len(self._records), MOST_TOGETHER):
                    with without_collector():
                        with clocks.stage("decode"):
                            events = [
                                decoder.decode(record.value, record.headers)
                                for record in self._records[start : start + MOST_TOGETHER]
                            ]
                        await _run_guarded(clocks, dispatcher, events)
                        await _run_handlers(clocks, handler, dispatcher, in_scope, events)
                    gc.collect(0)
        finally:
            await manager.close()
        return clocks.us(len(self._records))


async def _run_guarded(clocks: Clocks, dispatcher: EventDispatcher, events: Sequence[BaseEvent]) -> None:
    with clocks.stage("key"):
        executions = [dispatcher.executions(event)[0] for event in events]
    guarded = [execution for execution in executions if isinstance(execution, GuardedExecution)]
    executor = guarded[0].executor
    requested_at, options = executor.now(), RunOptions(_never)
    with clocks.stage("reserve"):
        verdicts = await executor.reserve_together([execution.work for execution in guarded])
    returned_runs: list[Returned[Any]] = []
    with clocks.stage("run"):
        for execution, verdict in zip(guarded, verdicts, strict=True):
            assert isinstance(verdict, Reserved)
            returned = await executor.reserved(execution.work, verdict, requested_at, options).call(
                execution.call_patiently
            )
            assert isinstance(returned, Returned)
            returned_runs.append(returned)
    with clocks.stage("settle"):
        written = await executor.complete_together(returned_runs)
    ensure(all(written), "the store refused an outcome")


async def _run_handlers(
    clocks: Clocks,
    handler: Handler,
    dispatcher: EventDispatcher,
    in_scope: EventDispatcher,
    events: Sequence[BaseEvent],
) -> None:
    with clocks.stage("handler"):
        for event in events:
            assert isinstance(event, OrderPlaced)
            await handler.handle(event)
    for name, variant in (("plain_call", dispatcher), ("scoped_call", in_scope)):
        calls = [_handler_call(variant.executions(event)[0]) for event in events]
        with clocks.stage(name):
            for call, attempt in calls:
                await call.handler.work(call, attempt)


def _handler_call(execution: HandlerExecution) -> tuple[HandlerExecution, Attempt]:
    return execution, Attempt("key", 1, 1, float("inf"), "label", 0)


async def _never(_: Exception) -> None:
    raise AssertionError("the store is not expected to fail")
