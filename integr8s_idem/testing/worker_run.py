"""One life of a worker: the real code, from its container to its end, between a store and a broker in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dishka import AsyncContainer

from integr8s_idem.config import KafkaSettings, Settings
from integr8s_idem.events import BaseEvent, Message
from integr8s_idem.handlers.router import BatchCall, HandlerCall, Invoke, RegisteredHandler
from integr8s_idem.records import StoreHealth
from integr8s_idem.runtime import Service
from integr8s_idem.runtime.background import run_background, run_worker
from integr8s_idem.runtime.containers import get_dispatcher
from integr8s_idem.runtime.service_group import section_of
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.outbox import Outbox
from integr8s_idem.testing.crash_points import CrashingStore, CrashPlan, CrashPoint, crashing_consumer
from integr8s_idem.testing.faults import Points, PointsOfClients
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.memory_broker import MemoryBroker, MemoryConsumer
from integr8s_idem.testing.observations import HandlerRun
from integr8s_idem.testing.provider_overrides import Overrides
from integr8s_idem.testing.simulated_processes import Process
from integr8s_idem.worker import EventPublisher, ServiceWorker
from integr8s_idem.worker.kafka_protocols import Consumer

if TYPE_CHECKING:
    from integr8s_idem.testing.sqlite_store import SqliteStore


@dataclass(slots=True)
class Events:
    """Events by their ids, whichever process they are of."""

    made: dict[str, BaseEvent] = field(default_factory=dict)
    """Written as a message, which a transaction may have kept for a relay."""
    published: dict[str, BaseEvent] = field(default_factory=dict)


class MemoryPublisher(EventPublisher):
    """Puts messages into a broker in memory, past the points around that."""

    def __init__(self, settings: KafkaSettings, broker: MemoryBroker, points: Points, events: Events) -> None:
        super().__init__(settings)
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

    async def send_message(self, message: Message) -> None:
        await super().send_message(message)
        self._events.published.setdefault(message.event_id, self._events.made[message.event_id])

    async def send(
        self, topic: str, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> None:
        verb = "dead_letter" if topic.endswith(self._dead_letter_suffix) else "send"
        await self._points.reached(f"before_{verb}")
        self._broker.append(topic, key, value, headers)
        await self._points.reached(f"after_{verb}")


class RelayingPublisher(MemoryPublisher):
    """What a relay publishes by: past the points around what handlers publish."""

    async def send_message(self, message: Message) -> None:
        await self._points.reached(CrashPoint.BEFORE_PUBLISH.value)
        await super().send_message(message)
        await self._points.reached(CrashPoint.AFTER_PUBLISH.value)


class MemoryStore(CrashingStore):
    """A store in memory as this life sees it, past the points around it."""

    async def ping(self) -> StoreHealth:
        # That it forgets everything at exit is what a test wants.
        return replace(await super().ping(), warnings=())


@dataclass(slots=True)
class World:
    """What outlives every worker."""

    settings: Settings
    broker: MemoryBroker
    store: FlakyStore
    overrides: Overrides
    points: Points = field(default_factory=Points)
    runs: list[HandlerRun] = field(default_factory=list)
    events: Events = field(default_factory=Events)
    sqlite: SqliteStore | None = None
    """The store in a file, if records are there."""

    def publisher(self, kind: type[MemoryPublisher] = MemoryPublisher) -> MemoryPublisher:
        """One that puts messages into its broker."""
        return kind(self.settings.kafka, self.broker, self.points, self.events)


class WorkerRun:
    """Begins when it is made; its successor is another one."""

    def __init__(self, world: World, service: Service, number: int) -> None:
        """`number`: 1 for the first."""
        self.service = service
        self.number = number
        self.process = Process(f"{service.name} {number}")
        self.worker: ServiceWorker | None = None
        self.consumer: MemoryConsumer | None = None
        self.outbox: Outbox | None = None
        """Where its transactions leave events for the relay."""
        self.told_to_stop = False
        self.busy = 0
        """Handlers that run."""
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
        """Whether it has settled and committed all that it was given."""
        return self.worker is not None and self.worker.report().in_flight == 0

    @property
    def behind(self) -> int:
        """Messages that its group has not committed."""
        assert self.worker is not None, "it has joined"
        return self._world.broker.behind(self.worker.group, self.worker.topics)

    def stop(self) -> None:
        """Drain."""
        self.told_to_stop = True
        if self.worker is not None:
            self.worker.stop()

    async def ended(self) -> None:
        """Return when it has ended; raises what it ended by."""
        await self._main

    def lose(self) -> None:
        """It has died, or stands still: its group does not hear of it any more."""
        if self.process.dead:
            for run in self._runs:
                run.how = "crashed" if run.how == "running" else run.how
        if self.consumer is not None:
            self._world.broker.leave(self.consumer)

    async def _run(self) -> None:
        world, settings = self._world, self._world.settings
        plan = PointsOfClients(world.points)
        publisher = world.publisher()
        container = self._container(plan, publisher)
        try:
            dispatcher = await get_dispatcher(container, self.service.name)
            dispatcher.invoke_with(self._seen(dispatcher.invoke))
            self.outbox = dispatcher.outbox
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
            relaying = world.publisher(RelayingPublisher)
            await run_worker(self.worker, dispatcher, relaying, settings.kafka, beside)
        finally:
            await container.close()

    def _container(self, plan: CrashPlan, publisher: MemoryPublisher) -> AsyncContainer:
        world = self._world
        ours: dict[Any, object] = {EventPublisher: publisher}
        if world.sqlite is None:
            ours[IdempotencyRepository] = MemoryStore(world.store, plan)
            return world.overrides.container(self.service, world.settings, ours)
        wrap = world.sqlite.wrapping(world.store, plan)
        return world.overrides.container(self.service, world.settings, ours, wrap)

    def _join(self, settings: KafkaSettings, group: str) -> Consumer:
        self.consumer = MemoryConsumer(self._world.broker, group)
        return self.consumer

    def _seen(self, invoke: Invoke) -> Invoke:
        """As `invoke`, with its points, and with all runs noted."""
        points = self._world.points

        async def call(handler: RegisteredHandler, what: HandlerCall | BatchCall) -> Any:
            await points.reached(CrashPoint.BEFORE_HANDLER.value)
            result = await self._noted(handler, what, lambda: invoke(handler, what))
            await points.reached(CrashPoint.AFTER_HANDLER.value)
            return result

        return call

    async def _noted(self, handler: RegisteredHandler, what: HandlerCall | BatchCall, call: Callable[[], Any]) -> Any:
        if isinstance(what, HandlerCall):
            pairs = [(what.event, what.attempt)]
        else:
            pairs = list(zip(what.events, what.batch.attempts, strict=True))
        runs = [HandlerRun(self.service.name, handler.name, event, attempt.number) for event, attempt in pairs]
        self._world.runs += runs
        self._runs += runs
        how = "cancelled"
        self.busy += 1
        try:
            result = await call()
            how = "returned"
            return result
        except Exception as error:
            how = type(error).__name__
            raise
        finally:
            self.busy -= 1
            if not self.process.dead:
                for run in runs:
                    run.how = how
