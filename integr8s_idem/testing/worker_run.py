"""One run of a worker: the real code with a store and a broker in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dishka import AsyncContainer

from integr8s_idem.config import KafkaSettings, Settings
from integr8s_idem.events import BaseEvent, Message
from integr8s_idem.handlers.handler_calls import BatchCall, HandlerCall, RegisteredHandler
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.records import StoreHealth
from integr8s_idem.runtime import Service
from integr8s_idem.runtime.background import run_background, run_worker
from integr8s_idem.runtime.containers import get_dispatcher
from integr8s_idem.runtime.outbox_relay import outbox_of, relay_outbox
from integr8s_idem.runtime.service_group import section_of
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.outbox import OutboxStore
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan, CrashPoint, crashing_consumer
from integr8s_idem.testing.faults import ClientPoints, Points
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.memory_broker import MemoryBroker, MemoryConsumer
from integr8s_idem.testing.observations import HandlerRun
from integr8s_idem.testing.provider_overrides import Overrides
from integr8s_idem.testing.published_events import Events
from integr8s_idem.testing.simulated_processes import Process
from integr8s_idem.testing.span_recorder import SpanRecorder
from integr8s_idem.worker import EventPublisher, ServiceWorker
from integr8s_idem.worker.kafka_protocols import Consumer
from integr8s_idem.worker.publisher import Placement

if TYPE_CHECKING:
    from integr8s_idem.testing.sqlite_store import SqliteStore


class MemoryPublisher(EventPublisher):
    """Publishes to an in-memory broker, with crash points."""

    def __init__(
        self, settings: KafkaSettings, broker: MemoryBroker, points: Points, events: Events, observer: Observer
    ) -> None:
        super().__init__(settings, observer)
        self._events = events
        self._broker = broker
        self._points = points
        self._dead_letter_suffix = settings.dead_letter_suffix

    async def publish(self, *events: BaseEvent) -> None:
        await self._points.reached(CrashPoint.BEFORE_PUBLISH.value)
        await super().publish(*events)
        await self._points.reached(CrashPoint.AFTER_PUBLISH.value)

    def message(self, event: BaseEvent) -> Message:
        self._events.made[event.event_id] = event
        return super().message(event)

    async def send_message(self, message: Message) -> Placement | None:
        placement = await super().send_message(message)
        self._events.note_published(message)
        return placement

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> Placement | None:
        verb = "dead_letter" if topic.endswith(self._dead_letter_suffix) else "send"
        await self._points.reached(f"before_{verb}")
        message = self._broker.append(topic, key, value, headers)
        await self._points.reached(f"after_{verb}")
        return Placement(message.partition, message.offset)


class RelayPublisher(MemoryPublisher):
    """The publisher of a relay, with the crash points of a handler's publisher."""

    async def send_message(self, message: Message) -> Placement | None:
        await self._points.reached(CrashPoint.BEFORE_PUBLISH.value)
        placement = await super().send_message(message)
        await self._points.reached(CrashPoint.AFTER_PUBLISH.value)
        return placement


class MemoryStore(CrashingStore):
    """The store of one worker run, with crash points."""

    async def ping(self) -> StoreHealth:
        # Losing all records at exit is intended in tests.
        return replace(await super().ping(), warnings=())


@dataclass(slots=True)
class World:
    """The state that outlives workers."""

    settings: Settings
    broker: MemoryBroker
    store: FlakyStore
    overrides: Overrides
    points: Points = field(default_factory=Points)
    runs: list[HandlerRun] = field(default_factory=list)
    reconciliations: list[HandlerRun] = field(default_factory=list)
    """Calls of reconcile functions."""
    events: Events = field(default_factory=Events)
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    sqlite: SqliteStore | None = None
    """The store in a file, if configured."""

    def publisher(self, kind: type[MemoryPublisher] = MemoryPublisher, observer: Observer = SILENT) -> MemoryPublisher:
        """Make a publisher for the broker."""
        return kind(self.settings.kafka, self.broker, self.points, self.events, observer)


class WorkerRun:
    """A run of a worker, started on construction.  After a crash it is replaced by another one."""

    def __init__(self, world: World, service: Service, number: int) -> None:
        """`number`: 1 for the first run of the service."""
        self.service = service
        self.number = number
        self.process = Process(f"{service.name} {number}")
        self.worker: ServiceWorker | None = None
        self.consumer: MemoryConsumer | None = None
        self.outbox: OutboxStore | None = None
        """The outbox that this run publishes, if there is one."""
        self.is_stopping = False
        self.busy = 0
        """Number of running handlers."""
        self._runs: list[HandlerRun] = []
        self._world = world
        self._main = self.process.start(self._run())

    @property
    def over(self) -> bool:
        return self._main.done()

    @property
    def starting(self) -> bool:
        """Whether its container is still being made."""
        return self.process.running and not self.over and self.worker is None

    @property
    def joined(self) -> bool:
        return self.consumer is not None and self.consumer.is_member

    @property
    def at_rest(self) -> bool:
        """Whether no events are in flight."""
        return self.worker is not None and self.worker.report().in_flight == 0

    @property
    def lag(self) -> int:
        """Number of messages that its group has not committed."""
        assert self.worker is not None, "the worker has joined its group"
        return self._world.broker.lag(self.worker.group, self.worker.topics)

    def stop(self) -> None:
        """Drain the worker."""
        self.is_stopping = True
        if self.worker is not None:
            self.worker.stop()

    async def ended(self) -> None:
        """Wait for the end of the run, and raise its error."""
        await self._main

    async def bury(self) -> None:
        """Clean up after a crash."""
        self.process.die()
        if self.worker is not None:
            # Or it would believe that handlers have cancelled its tasks, which are cancelled now, and start others.
            self.process.call(self.worker.abandon_all)
        await self.process.bury()

    def lose(self) -> None:
        """Remove a crashed or stalled worker from its group."""
        if self.process.dead:
            for run in self._runs:
                run.how = "crashed" if run.how == "running" else run.how
        if self.consumer is not None:
            self._world.broker.leave(self.consumer)

    async def _run(self) -> None:
        world, settings = self._world, self._world.settings
        plan = ClientPoints(world.points)
        observer = world.spans.observer(self.service.name, group=self.service.group_id)
        publisher = world.publisher(observer=observer)
        container = self._container(plan, publisher, observer)
        try:
            dispatcher = await get_dispatcher(container, self.service.name)
            dispatcher.invoke_with(self._recorded(dispatcher.invoke))
            self.outbox = dispatcher.outbox
            if self.outbox is None and relay_outbox in self.service.background:
                self.outbox = outbox_of(await container.get(IdempotencyRepository))
            self.worker = ServiceWorker(
                self.service.name,
                dispatcher,
                publisher,
                settings.kafka,
                section_of(self.service, settings),
                group=self.service.group_id,
                replay=settings.replay,
                consumer=crashing_consumer(plan, self._join),
            )
            beside = [run_background(work, container) for work in self.service.background]
            relaying = world.publisher(RelayPublisher, observer)
            await run_worker(self.worker, dispatcher, relaying, settings.kafka, beside)
        finally:
            await container.close()

    def _container(self, plan: CrashPlan, publisher: MemoryPublisher, observer: Observer) -> AsyncContainer:
        world = self._world
        replacements: dict[Any, object] = {EventPublisher: publisher, Observer: observer}
        if world.sqlite is None:
            replacements[IdempotencyRepository] = MemoryStore(world.store, plan)
            return world.overrides.container(self.service, world.settings, replacements)
        wrap = world.sqlite.wrapping(world.store, plan)
        return world.overrides.container(self.service, world.settings, replacements, wrap)

    def _join(self, settings: KafkaSettings, group: str) -> Consumer:
        self.consumer = MemoryConsumer(self._world.broker, group)
        return self.consumer

    def _recorded(self, invoke: Invoke) -> Invoke:
        """Wrap `invoke` with crash points, and record all runs."""
        points = self._world.points

        async def call(handler: RegisteredHandler, what: HandlerCall | BatchCall) -> Any:
            if handler.is_reconcile:
                return await self._record(handler, what, lambda: invoke(handler, what))
            await points.reached(CrashPoint.BEFORE_HANDLER.value)
            result = await self._record(handler, what, lambda: invoke(handler, what))
            await points.reached(CrashPoint.AFTER_HANDLER.value)
            return result

        return call

    async def _record(self, handler: RegisteredHandler, what: HandlerCall | BatchCall, call: Callable[[], Any]) -> Any:
        if isinstance(what, HandlerCall):
            pairs = [(what.event, what.attempt)]
        else:
            pairs = list(zip(what.events, what.batch.attempts, strict=True))
        runs = [HandlerRun(self.service.name, handler.name, event, attempt.number) for event, attempt in pairs]
        recorded = self._world.reconciliations if handler.is_reconcile else self._world.runs
        recorded += runs
        self._runs += runs
        how = "cancelled"
        self.busy += 1
        try:
            result = await call()
            how = type(result).__name__ if handler.is_reconcile else "returned"
            return result
        except Exception as error:
            how = type(error).__name__
            raise
        finally:
            self.busy -= 1
            if not self.process.dead:
                for run in runs:
                    run.how = how
