"""`EmbeddedHarness`: the services of an application in a test, over real sockets and a real store.

    @pytest.fixture
    def harness(embedded_servers: EmbeddedServers, payments: FakePayments) -> EmbeddedHarness:
        return EmbeddedHarness(platform, "billing", servers=embedded_servers, fakes={Payments: payments})

For what `WorkerHarness` leaves out: Redis itself, or the database of the settings on a server.
Time is real, and nobody dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from dishka import AsyncContainer
from dishka.provider import BaseProvider

from integr8s_idem.config import Settings, load_settings
from integr8s_idem.embedded.kafka_server import PARTITIONS
from integr8s_idem.embedded.settings_overlay import NO_KAFKA_CREDENTIALS, embedded_settings, merged
from integr8s_idem.events import BaseEvent
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.service_group import RunningService
from integr8s_idem.testing.harness_run import NotSettledError
from integr8s_idem.testing.provider_overrides import Overrides
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.consumer import make_consumer
from integr8s_idem.worker.isolation_gate import IsolationGate
from integr8s_idem.worker.kafka_protocols import Consumer, Partition

if TYPE_CHECKING:
    from integr8s_idem.embedded import EmbeddedServers


PATIENCE_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 0.02


class EmbeddedHarness:
    """Services of an application, each by one worker, on servers that run.

    Inside of `async with`, or by the pytest plugin, which enters every harness that is a fixture of a test.  Topics and
    keys are its own: tests may share the servers.
    """

    def __init__(
        self,
        application: Platform | Service,
        *services: str,
        servers: EmbeddedServers,
        fakes: Mapping[Any, object] | None = None,
        providers: Sequence[BaseProvider] = (),
        settings: Path | None = None,
        overrides: Mapping[str, Any] | None = None,
        own_store: bool = False,
    ) -> None:
        """
        Args:
            application: What `integr8s-idem run` would run, or one service.
            services: Those of the platform that are to run; all of them if none is named.
            servers: Where Kafka and Redis are.
            fakes: Objects that take the place of what the containers provide, by its type.
            providers: Dishka providers with `override=True`, for fakes with a scope or dependencies of their own.
            settings: A file of settings; ./settings.toml if it is there, if not given.
            overrides: Nested values that win: `{"idempotency": {"max_attempts": 2}}`.
            own_store: Records are where the settings say, as the handlers' transactions may need it.

        Raises:
            ApplicationError: The platform has no such service.
            SettingsError: As `load_settings`.
        """
        platform = application if isinstance(application, Platform) else Platform(application)
        self._services = platform.choose(services)
        self._overrides = Overrides(fakes or {}, providers)
        sections = {name: section for name, section in servers.settings().items() if name != "store" or not own_store}
        self._settings = _settings(platform, sections, settings, overrides or {})
        self._publisher: EventPublisher | None = None
        self._running: list[RunningService] = []
        self._containers: list[AsyncContainer] = []
        self._watching: list[tuple[Consumer, Sequence[str]]] = []
        self._sent: list[BaseEvent] = []
        self._stack = AsyncExitStack()

    @property
    def entered(self) -> bool:
        """Whether it has begun."""
        return self._publisher is not None

    async def publish(self, *events: BaseEvent) -> None:
        """Publish `events`, and return once they are settled, with all that comes of them.

        Raises:
            NotSettledError: As `settled`.
        """
        assert self._publisher is not None, "inside of `async with`"
        self._sent += events
        await self._publisher.publish(*events)
        await self.settled()

    async def redeliver_all(self) -> None:
        """Publish everything once more that was published so far, and return once that is settled."""
        sent, self._sent = self._sent, []
        await self.publish(*sent)

    async def settled(self) -> None:
        """Return once all topics that are read are settled to their ends, and committed.

        Raises:
            NotSettledError: They are not, for half a minute.
            Exception: What a service has ended by.
        """
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self._is_open():
                    self._check()
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise NotSettledError(str([service.report() for service in self._running])) from None

    async def _is_open(self) -> bool:
        # What is consumed may leave messages in an outbox, and these are consumed in turn: it is looked at twice.
        return (
            await self._waits_to_be_sent()
            or any([await _behind(consumer, topics) for consumer, topics in self._watching])
            or await self._waits_to_be_sent()
        )

    async def _waits_to_be_sent(self) -> bool:
        """Whether a transaction has left messages that its relay has not published yet."""
        outboxes = [(await container.get(EventDispatcher)).outbox for container in self._containers]
        return any([await outbox.count() for outbox in outboxes if outbox is not None])

    @property
    def handled(self) -> int:
        """Deliveries whose handler has run to its end."""
        return sum(service.report().tally.handled for service in self._running)

    @property
    def duplicates(self) -> int:
        """Deliveries that were answered by an earlier run's record."""
        return sum(service.report().tally.duplicates for service in self._running)

    def _check(self) -> None:
        for service in self._running:
            if service.error is not None:
                raise service.error

    async def __aenter__(self) -> EmbeddedHarness:
        self._publisher = EventPublisher(self._settings.kafka)
        self._stack.push_async_callback(self._publisher.close)
        isolation = IsolationGate()
        self._running = [RunningService(self._faked(each), self._settings, isolation) for each in self._services]
        for service in self._running:
            await self._stack.enter_async_context(_under_way(service))
        while not all(service.health().ready for service in self._running):
            self._check()
            await asyncio.sleep(LOOK_SECONDS)
        self._watching = [await self._watch(service) for service in self._running]
        self._overrides.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._check()

    async def _watch(self, running: RunningService) -> tuple[Consumer, Sequence[str]]:
        """Somebody who asks where the group of a service is, and is no member of it."""
        worker = running.worker
        assert worker is not None, "it is ready"
        consumer = make_consumer(self._settings.kafka, worker.group)
        await consumer.start()
        self._stack.push_async_callback(consumer.stop)
        return consumer, worker.topics

    def _faked(self, service: Service) -> Service:
        def container(settings: Settings) -> AsyncContainer:
            made = self._overrides.container(service, settings, {})
            self._containers.append(made)
            return made

        return replace(service, providers=None, container=container, overrides=())


@asynccontextmanager
async def _under_way(service: RunningService) -> AsyncIterator[None]:
    task = asyncio.create_task(service.run())
    try:
        yield
    finally:
        service.stop()
        await task


async def _behind(consumer: Consumer, topics: Sequence[str]) -> int:
    """Messages of `topics` that its group has not committed, as the broker knows it."""
    ends = await consumer.end_offsets([Partition(topic, number) for topic in topics for number in range(PARTITIONS)])
    return sum([end - (await _committed(consumer, at) or 0) for at, end in ends.items() if end])


async def _committed(consumer: Any, partition: Partition) -> int | None:
    """Asked of the coordinator of the group."""
    offset: int | None = await consumer.committed(partition)
    return offset


def _settings(
    platform: Platform, servers: Mapping[str, Any], file: Path | None, overrides: Mapping[str, Any]
) -> Settings:
    services = list(platform.services)
    below = merged(NO_KAFKA_CREDENTIALS, overrides)
    own: Settings = load_settings(file, platform.settings_type, overrides=below, services=services)
    mine = f"test-{uuid4().hex[:12]}"
    quick = {
        "kafka": {"topic_prefix": f"{mine}.{own.kafka.topic_prefix}"},
        "idempotency": {"key_prefix": f"{own.idempotency.key_prefix}-{mine}"},
        "telemetry": {"metrics_enabled": False, "spans": "off", "otlp_endpoint": None},
        "services": {name: {"commit_interval_seconds": 0.05} for name in services},
    }
    laid_over = merged(merged(embedded_settings(own, servers), overrides), quick)
    settings: Settings = load_settings(file, platform.settings_type, overrides=laid_over, services=services)
    return settings
