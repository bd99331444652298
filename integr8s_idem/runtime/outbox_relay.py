"""Run the relay of an outbox: in a worker, as a background task of a service, or as a process of its own."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from dishka import AsyncContainer

from integr8s_idem.config import KafkaSettings, Settings
from integr8s_idem.errors import ApplicationError, StoreError
from integr8s_idem.runtime.endpoints import Endpoints
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import SqlSettings, open_store
from integr8s_idem.stores.outbox import OutboxStore
from integr8s_idem.telemetry import Gauge, Observer
from integr8s_idem.telemetry.setup import configure_telemetry, observer_for
from integr8s_idem.worker.health import Health, ServiceHealth
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.relay import Relay

logger = logging.getLogger(__name__)

NAME: Final = "relay"
"""Name of a relay process in metrics, spans and health."""


def make_relay(outbox: OutboxStore, publisher: EventPublisher, kafka: KafkaSettings, observer: Observer) -> Relay:
    """Return a relay, which also publishes the events of other processes."""
    # If the claim expired while a message is being sent, another relay could send a later message of the key first.
    claim_seconds = max(60.0, 3 * kafka.request_timeout_seconds)
    return Relay(outbox, publisher, claim_seconds=claim_seconds, observer=observer)


async def measure_backlog(outbox: OutboxStore, observer: Observer) -> None:
    """Measure the events that wait in the outbox.

    Raises:
        StoreError: The database does not answer.
    """
    backlog = await outbox.backlog()
    observer.measure(Gauge.OUTBOX_WAITING, backlog.count)
    observer.measure(Gauge.OUTBOX_AGE, backlog.age.total_seconds())


async def relay_outbox(container: AsyncContainer) -> None:
    """Publish the outbox in the database of a service's records: `Service(…, background=[relay_outbox])`.

    Services with transactional handlers publish it anyway.

    Raises:
        ApplicationError: The records are not in a SQL database.
    """
    repository, publisher = await container.get(IdempotencyRepository), await container.get(EventPublisher)
    settings, observer = await container.get(Settings), await container.get(Observer)
    outbox = outbox_of(repository)
    await outbox.check()
    relay = make_relay(outbox, publisher, settings.kafka, observer)
    await _concurrently(relay.run(), _keep_measuring(outbox, observer, settings))


def outbox_of(repository: IdempotencyRepository, timeout: timedelta = timedelta(seconds=5)) -> OutboxStore:
    """Return the outbox in the database of `repository`.

    Raises:
        ApplicationError: It is not a SQL database.
    """
    from integr8s_idem.stores.sql import SqlIdempotencyRepository, SqlOutbox

    if not isinstance(repository, SqlIdempotencyRepository):
        raise ApplicationError(
            f"an outbox is in a SQL database, not in {type(repository).__name__}: run `integr8s-idem relay` with "
            "settings whose [store] is the database that the events are written to"
        )
    return SqlOutbox(repository.engine, timeout=timeout)


@asynccontextmanager
async def opened_outbox(settings: Settings) -> AsyncIterator[OutboxStore]:
    """Open the outbox in the database of `[store]`, and check that it is complete.

    Raises:
        ApplicationError: `[store]` is not a SQL database.
        StoreError: Its tables are missing or of another version, or it does not answer.
    """
    store = settings.store
    if not isinstance(store, SqlSettings):
        raise ApplicationError(
            f'[store] kind is "{store.kind}", which has no outbox: use settings whose [store] is the SQL database that '
            "the events are written to"
        )
    async with open_store(store, key_prefix=settings.idempotency.key_prefix) as repository:
        await repository.ping()
        outbox = outbox_of(repository, timedelta(seconds=store.timeout_seconds))
        await outbox.check()
        yield outbox


class RelayProcess:
    """A process that publishes the outbox of `[store]`, with metrics and health."""

    def __init__(self, settings: Settings, on_metrics: Callable[[str, int], None] = lambda host, port: None) -> None:
        """`on_metrics` is called with the host and port of the metrics endpoint."""
        self._settings = settings
        self._on_metrics = on_metrics
        self._relay: Relay | None = None

    def health(self) -> Health:
        """Return liveness, and readiness: whether the database answers."""
        reason = "starting" if self._relay is None else self._relay.store_error
        return Health((ServiceHealth(NAME, live=True, ready=not reason, reason=reason),))

    async def run(self) -> int:
        """Publish until SIGTERM or SIGINT, and return the exit status.

        Raises:
            ApplicationError: `[store]` is not a SQL database.
            StoreError: The outbox cannot be used.
            SettingsError: The address of the metrics endpoint is in use.
        """
        telemetry = self._settings.telemetry
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(configure_telemetry(telemetry, service_name=NAME))
            observer = observer_for(telemetry, NAME, group=None, kafka=self._settings.kafka)
            # First, so that a store without an outbox is the only thing that is reported.
            outbox = await stack.enter_async_context(opened_outbox(self._settings))
            if telemetry.metrics_enabled:
                endpoints = Endpoints(telemetry.metrics_host, telemetry.metrics_port, health=self.health)
                await stack.enter_async_context(endpoints)
                self._on_metrics(telemetry.metrics_host, endpoints.port)
                logger.info("metrics and health on http://%s:%d", telemetry.metrics_host, endpoints.port)
            publisher = EventPublisher(self._settings.kafka, observer)
            stack.push_async_callback(publisher.close)
            relay = self._relay = make_relay(outbox, publisher, self._settings.kafka, observer)
            logger.info("publishing the events of the outbox")
            with stopped_by_signals(relay, outbox):
                await _concurrently(relay.run(), _keep_measuring(outbox, observer, self._settings))
            logger.info("stopped after publishing %d events", relay.published)
        return 0


@contextmanager
def stopped_by_signals(relay: Relay, outbox: OutboxStore) -> Iterator[None]:
    """Stop `relay` at the first SIGTERM or SIGINT within the block; a second one cancels the current task."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    stops = 0

    def stop() -> None:
        nonlocal stops
        stops += 1
        relay.stop()
        outbox.notice()
        if stops > 1:
            task.cancel()

    caught = (signal.SIGTERM, signal.SIGINT)
    for number in caught:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in caught:
            loop.remove_signal_handler(number)


async def _keep_measuring(outbox: OutboxStore, observer: Observer, settings: Settings) -> None:
    while True:
        with suppress(StoreError):  # the relay logs that the database does not answer
            await measure_backlog(outbox, observer)
        await asyncio.sleep(settings.telemetry.keys_active_interval_seconds)


async def _concurrently(main: Coroutine[Any, Any, None], beside: Coroutine[Any, Any, None]) -> None:
    """Run `main`, and `beside` until it ends."""
    other = asyncio.get_running_loop().create_task(beside)
    try:
        await main
    finally:
        other.cancel()
        await asyncio.wait({other})
    if not other.cancelled():
        other.result()
