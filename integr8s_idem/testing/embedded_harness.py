"""`EmbeddedHarness`: run the services of an application in a test, with real sockets and a real store.

    @pytest.fixture
    def harness(embedded_servers: EmbeddedServers, payments: FakePayments) -> EmbeddedHarness:
        return EmbeddedHarness(platform, "billing", servers=embedded_servers, fakes={Payments: payments})

Use it to test with Redis itself, or with the configured database on a server, which `WorkerHarness` does not cover.
Time is real, and there are no crashes.
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
from integr8s_idem.testing.harness_arguments import check_events, platform_of
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
    """Runs services of an application, each with one worker, on running servers.

    Use it in `async with`, or with the pytest plugin, which enters every harness that is a fixture of a test.  Each
    harness has its own topics and keys, so tests may share the servers.
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
            application: The platform that `integr8s-idem run` would run, or one service.
            services: The services of the platform to run; all if none is named.
            servers: The addresses of Kafka and Redis.
            fakes: Objects that replace those of the containers, by type.
            providers: Dishka providers with `override=True`, for fakes with their own scope or dependencies.
            settings: A settings file; ./settings.toml, if it exists, by default.
            overrides: Nested values that take precedence: `{"idempotency": {"max_attempts": 2}}`.
            own_store: Keep the records in the configured store, for example for transactional handlers.

        Raises:
            ApplicationError: The platform has no such service, or `application` is neither a platform nor a service.
            SettingsError: The settings are invalid; see `load_settings`.
        """
        platform = platform_of(application, "EmbeddedHarness")
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
        """Whether the harness has been entered, and has not ended."""
        return self._publisher is not None

    async def publish(self, *events: BaseEvent) -> None:
        """Publish `events`, and wait until they and the events that they cause are settled.

        Raises:
            ApplicationError: One is not an event.
            NotSettledError: See `settled`.
        """
        check_events(*events)
        publisher = self._require_open()
        self._sent += events
        await publisher.publish(*events)
        await self.settled()

    async def redeliver_all(self) -> None:
        """Publish all events so far once more, and wait until they are settled."""
        sent, self._sent = self._sent, []
        await self.publish(*sent)

    async def settled(self) -> None:
        """Wait until all messages of the services' topics are settled and committed.

        Raises:
            NotSettledError: This took longer than half a minute.
            Exception: The error with which a service ended.
        """
        self._require_open()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self._is_open():
                    self._check()
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            reports = str([service.report() for service in self._running])
            raise NotSettledError(reports, f"{PATIENCE_SECONDS:g} seconds") from None

    async def _is_open(self) -> bool:
        # Consumed messages may add events to an outbox, which are consumed later: check twice.
        return (
            await self._waits_to_be_sent()
            or any([await _lag(consumer, topics) for consumer, topics in self._watching])
            or await self._waits_to_be_sent()
        )

    async def _waits_to_be_sent(self) -> bool:
        """Whether a transaction has left messages that its relay has not published yet."""
        outboxes = [(await container.get(EventDispatcher)).outbox for container in self._containers]
        return any([await outbox.count() for outbox in outboxes if outbox is not None])

    @property
    def handled(self) -> int:
        """Number of deliveries whose handler has finished."""
        return sum(service.report().tally.handled for service in self._running)

    @property
    def duplicates(self) -> int:
        """Number of deliveries answered by the record of an earlier run."""
        return sum(service.report().tally.duplicates for service in self._running)

    def _require_open(self) -> EventPublisher:
        """Return the publisher, unless the services have ended: then only `handled` and `duplicates` can be read."""
        if self._publisher is None:
            raise RuntimeError(
                "this harness has not been entered, or has ended: use it inside `async with harness:`, or in a test "
                "with the plugin integr8s_idem.testing.plugin"
            )
        return self._publisher

    def _check(self) -> None:
        for service in self._running:
            if service.error is not None:
                raise service.error

    async def __aenter__(self) -> EmbeddedHarness:
        try:
            await self._begin()
        except BaseException:
            await self._end()
            raise
        return self

    async def _begin(self) -> None:
        self._containers, self._sent = [], []
        self._publisher = EventPublisher(self._settings.kafka)
        self._stack.push_async_callback(self._publisher.close)
        isolation = IsolationGate()
        self._running = [RunningService(self._with_fakes(each), self._settings, isolation) for each in self._services]
        for service in self._running:
            await self._stack.enter_async_context(_started(service))
        while not all(service.health().ready for service in self._running):
            self._check()
            await asyncio.sleep(LOOK_SECONDS)
        self._watching = [await self._watch(service) for service in self._running]
        self._overrides.check()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()
        self._check()

    async def _end(self) -> None:
        self._publisher = None
        await self._stack.aclose()

    async def _watch(self, running: RunningService) -> tuple[Consumer, Sequence[str]]:
        """Make a consumer that reads the offsets of a service's group without joining it."""
        worker = running.worker
        assert worker is not None, "a ready service has a worker"
        consumer = make_consumer(self._settings.kafka, worker.group)
        await consumer.start()
        self._stack.push_async_callback(consumer.stop)
        return consumer, worker.topics

    def _with_fakes(self, service: Service) -> Service:
        def container(settings: Settings) -> AsyncContainer:
            made = self._overrides.container(service, settings, {})
            self._containers.append(made)
            return made

        return replace(service, providers=None, container=container, overrides=())


@asynccontextmanager
async def _started(service: RunningService) -> AsyncIterator[None]:
    task = asyncio.create_task(service.run())
    try:
        yield
    finally:
        service.stop()
        await task


async def _lag(consumer: Consumer, topics: Sequence[str]) -> int:
    """Return the number of messages of `topics` that the group has not committed, according to the broker."""
    ends = await consumer.end_offsets([Partition(topic, number) for topic in topics for number in range(PARTITIONS)])
    return sum([end - (await _committed(consumer, at) or 0) for at, end in ends.items() if end])


async def _committed(consumer: Any, partition: Partition) -> int | None:
    """Return the committed offset from the group coordinator."""
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
