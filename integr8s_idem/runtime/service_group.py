"""Run services concurrently in one process.

A service that fails does not stop the others; the health endpoints and the exit status report it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Final

from dishka import AsyncContainer

from integr8s_idem.config import ServiceSettings, Settings
from integr8s_idem.errors import ApplicationError, IdempotencyError, StoreError
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.runtime.background import run_background, run_worker, wait_forever
from integr8s_idem.runtime.containers import get_dispatcher, get_publisher, make_container
from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.runtime.observe_mode import log_mode
from integr8s_idem.runtime.outbox_relay import measure_backlog
from integr8s_idem.runtime.service import Service, check_groups
from integr8s_idem.runtime.supervisor_link import SupervisorLink
from integr8s_idem.telemetry import Gauge
from integr8s_idem.telemetry.log_fields import SOURCE, ServiceSource
from integr8s_idem.telemetry.setup import configure_telemetry
from integr8s_idem.worker.broker_facts import list_topics, reach_brokers
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.consumer import ServiceReport, ServiceWorker
from integr8s_idem.worker.health import Health, ServiceHealth
from integr8s_idem.worker.isolation_gate import IsolationGate
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.retention import TTL, Reading
from integr8s_idem.worker.retention_check import check_retention
from integr8s_idem.worker.tally import Tally

logger = logging.getLogger(__name__)

_FIRST_CLOSE_SECONDS: Final = 15.0
"""Timeout for closing a service's container, which waits until outcomes are recorded."""
_REST_CLOSE_SECONDS: Final = 2.0
"""Timeout for closing the rest, if one of its objects is not closed in time."""
CLOSE_SECONDS: Final = _FIRST_CLOSE_SECONDS + _REST_CLOSE_SECONDS
"""How long closing a service's container takes at most."""


class RunningService:
    """A service from the creation of its container until its end."""

    def __init__(
        self,
        service: Service,
        settings: Settings,
        isolation: IsolationGate,
        *,
        on_first_poll: Callable[[], None] = lambda: None,
        process: int = 1,
    ) -> None:
        self.service = service
        self._process = process
        self._on_first_poll = on_first_poll
        self._isolation = isolation
        self.error: BaseException | None = None
        self._settings = settings
        self._worker: ServiceWorker | None = None
        self._stopping = False

    def stop(self) -> None:
        """Start draining."""
        self._stopping = True
        if self._worker is not None:
            self._worker.stop()

    @property
    def worker(self) -> ServiceWorker | None:
        """The worker; `None` until it is created."""
        return self._worker

    @property
    def stuck(self) -> bool:
        """Whether a cancelled handler is still running."""
        return self._worker is not None and self._worker.stuck

    def report(self) -> ServiceReport:
        """Return the current state."""
        if self._worker is not None:
            return self._worker.report()
        state = "failed" if self.error is not None else "starting"
        return ServiceReport(self.service.name, state, 0, 0, 0, Tally(), str(self.error or ""))

    def health(self) -> ServiceHealth:
        """Return liveness and readiness."""
        if self.error is not None:
            return ServiceHealth(self.service.name, live=False, ready=False, reason=type(self.error).__name__)
        if self._worker is None:
            return ServiceHealth(self.service.name, live=True, ready=False, reason="starting")
        return self._worker.health()

    async def run(self) -> None:
        """Run until stopped or failed; `error` is the error of a failed service.  Call it in a task of its own."""
        SOURCE.set(ServiceSource(self.service.name))
        try:
            await self._run()
        except IdempotencyError as error:
            # The message states what to do: only errors of the application's code need a traceback.
            self.error = error
            cause = error.__cause__ if isinstance(error, ApplicationError) else None
            logger.error("service %s failed: %s: %s", self.service.name, type(error).__name__, error, exc_info=cause)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # Otherwise, the process would exit with status 0, and nothing would restart it.
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            self.error = error
            logger.exception("service %s failed", self.service.name)

    async def _run(self) -> None:
        name = self.service.name
        container = make_container(self.service, self._settings)
        try:
            dispatcher = await get_dispatcher(container, name)
            self._check(dispatcher)
            log_mode(self._settings, name, dispatcher)
            publisher = await get_publisher(container, name)
            section = section_of(self.service, self._settings)
            self._worker = ServiceWorker(
                name,
                dispatcher,
                publisher,
                self._settings.kafka,
                section,
                group=self.service.group_id,
                isolation=self._isolation,
                reach_brokers=reach_brokers,
                list_topics=list_topics,
                on_first_poll=self._on_first_poll,
                replay=self._settings.replay,
                process=self._process,
            )
            reading = reading_of(dispatcher, self._worker.sources)
            if self._settings.kafka.retention_check == "refuse":
                await check_retention(name, self._settings.kafka, reading)
            if self._stopping:
                return
            await self._work(container, self._worker, dispatcher, publisher, reading)
        finally:
            await _close(container, self.service.name)

    def _check(self, dispatcher: EventDispatcher) -> None:
        name = self.service.name
        if dispatcher.scope and dispatcher.scope != name:
            raise ApplicationError(
                f"service {name} uses the container of {dispatcher.scope}: they would share keys, and events handled "
                f'by one would be duplicates for the other. Provide ServiceName("{name}")'
            )

    async def _work(
        self,
        container: AsyncContainer,
        worker: ServiceWorker,
        dispatcher: EventDispatcher,
        publisher: EventPublisher,
        reading: Reading,
    ) -> None:
        background = [run_background(work, container) for work in self.service.background]
        background.append(self._count(dispatcher))
        if self._settings.kafka.retention_check == "warn":
            background.append(self._compare(reading))
        await run_worker(worker, dispatcher, publisher, self._settings.kafka, background)

    async def _compare(self, reading: Reading) -> None:
        """Check retention in the background, so that slow brokers do not delay the start."""
        try:
            await check_retention(self.service.name, self._settings.kafka, reading)
        except Exception:  # a failed check must not stop the service
            logger.exception("%s: cannot check the settings of its topics", self.service.name)
        await wait_forever()

    async def _count(self, dispatcher: EventDispatcher) -> None:
        """Measure active keys in the store, since a local counter would miss other processes and crashes."""
        manager, outbox = dispatcher.manager, dispatcher.outbox
        while True:
            await asyncio.sleep(self._settings.telemetry.keys_active_interval_seconds if manager else 3600)
            if manager is None:
                continue
            try:
                dispatcher.observer.measure(Gauge.KEYS_ACTIVE, await manager.count_active())
                if outbox is not None:
                    await measure_backlog(outbox, dispatcher.observer)
            except StoreError as error:
                logger.debug("cannot count active keys: %s", error)


def section_of(service: Service, settings: Settings) -> ServiceSettings:
    """Return the settings of `service`, with the topics of the service if the settings do not name any."""
    section = settings.service(service.name)
    if section.topics is None and service.topics is not None:
        section = section.model_copy(update={"topics": tuple(service.topics)})
    return section


def reading_of(dispatcher: EventDispatcher, topics: Sequence[str]) -> Reading:
    """Return the topics and the ttl of a service with this dispatcher."""
    if dispatcher.ttl is None or dispatcher.manager is None:
        return Reading(tuple(topics), None)
    own = dispatcher.ttl != dispatcher.manager.config.ttl
    return Reading(tuple(topics), dispatcher.ttl.total_seconds(), "the ttl of its dispatcher" if own else TTL)


def _is_being_cancelled() -> bool:
    """Whether the current task has been cancelled, rather than that it awaits something that was."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _close(container: AsyncContainer, name: str) -> None:
    """Close a container, and again if it stops at an object of the application: those that remain include the store."""
    for seconds in (_FIRST_CLOSE_SECONDS, _REST_CLOSE_SECONDS):
        try:
            await bounded(_close_all(container), seconds)
        except TimeoutError as error:
            logger.warning("%s: closing its container: %s", name, error)
        else:
            return


async def _close_all(container: AsyncContainer) -> None:
    """Close a container.  `SystemExit` would end the event loop, with the handlers of other services."""
    try:
        await container.close()
    except SystemExit as error:
        await _close_all(container)  # what remains
        raise ApplicationError("an object of the container called sys.exit() when it was closed") from error


class ServiceGroup:
    """The services of this process."""

    def __init__(
        self,
        services: Sequence[Service],
        settings: Settings,
        on_metrics: Callable[[str, int], None] = lambda host, port: None,
        *,
        link: SupervisorLink | None = None,
    ) -> None:
        """Create a group of services without running it.

        Args:
            services: The services to run.
            settings: Settings of the process.
            on_metrics: Called with the host and port of the metrics endpoint when it is available.
            link: Connection to the supervisor of this process, which serves the metrics endpoint.

        Raises:
            ApplicationError: Two services share a consumer group.
        """
        self._on_metrics = on_metrics
        self._link = link
        check_groups(services, settings)
        isolation = IsolationGate()
        announce, process = (link.announce_ready, link.number) if link is not None else (lambda: None, 1)
        self._running = [
            RunningService(each, settings, isolation, on_first_poll=announce, process=process) for each in services
        ]
        self._settings = settings
        self._stops = 0
        self._tasks: list[asyncio.Task[None]] = []

    def reports(self) -> list[ServiceReport]:
        """Return the current state of each service."""
        return [service.report() for service in self._running]

    def health(self) -> Health:
        """Return liveness and readiness of each service."""
        return Health(tuple(service.health() for service in self._running))

    @property
    def stuck(self) -> bool:
        """Whether a cancelled handler is still running: the event loop cannot end before it does."""
        return any(service.stuck for service in self._running)

    def stop(self) -> None:
        """Drain at the first call; at the second, cancel running handlers, whose events are redelivered."""
        if not self._stops:
            self.drain()
        else:
            self.stop_now()

    def drain(self) -> None:
        """Drain; does nothing if the services already drain."""
        if self._stops:
            return
        self._stops = 1
        hint = "" if self._link else "; a second signal stops immediately"
        logger.info("draining: waiting for running handlers%s", hint)
        for service in self._running:
            service.stop()

    def stop_now(self) -> None:
        """Cancel running handlers, whose events are redelivered."""
        self._stops = 2
        logger.warning("stopping immediately")
        for task in self._tasks:
            task.cancel()

    async def run(self) -> int:
        """Run until stopped, and return the exit status: 1 if a service failed or was stopped immediately, else 0."""
        telemetry = self._settings.telemetry
        names = ",".join(service.service.name for service in self._running)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(configure_telemetry(telemetry, service_name=names))
            if telemetry.metrics_enabled and self._link is None:
                endpoints = Endpoints(telemetry.metrics_host, telemetry.metrics_port, health=self.health)
                await stack.enter_async_context(endpoints)
                self._on_metrics(telemetry.metrics_host, endpoints.port)
                logger.info("metrics and health on http://%s:%d", telemetry.metrics_host, endpoints.port)
            stack.enter_context(self._link.attached(self) if self._link else self._signals())
            self._tasks = [asyncio.get_running_loop().create_task(service.run()) for service in self._running]
            await asyncio.wait(self._tasks)
        return 1 if self._stops > 1 or self.stuck or any(service.error is not None for service in self._running) else 0

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        caught = (signal.SIGTERM, signal.SIGINT)
        for number in caught:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in caught:
                loop.remove_signal_handler(number)


async def run_services(services: Sequence[Service], settings: Settings) -> int:
    """Run `services` until SIGTERM or SIGINT, and return the exit status: 1 if a service failed, else 0.

    Raises:
        ApplicationError: Two services share a consumer group.
        SettingsError: The address of the metrics endpoint is in use.
    """
    return await ServiceGroup(services, settings).run()
