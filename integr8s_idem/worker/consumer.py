"""`ServiceWorker`: join a consumer group, consume, drain, and leave.

A broken Kafka client is replaced.  docs/explanation/worker.md describes aiokafka's pitfalls and the rules that follow
from them; R and A numbers in comments refer to that page.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.errors import KafkaError

from integr8s_idem._util import speedups
from integr8s_idem.codecs import Codec, IdFromHeader, codec_of
from integr8s_idem.config import KafkaSettings, ReplaySettings, ServiceSettings
from integr8s_idem.errors import ApplicationError, BrokerUnavailableError, MemberFencedError, StoreUnavailableError
from integr8s_idem.events import EventDecoder, event_type_of, read_json
from integr8s_idem.handlers.dispatcher import EventDispatcher
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.records import StoreHealth
from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.worker.assignments import Delivery
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.backpressure import Backpressure
from integr8s_idem.worker.batch_limits import limits_of_batches
from integr8s_idem.worker.client_options import bounded, connection_options
from integr8s_idem.worker.client_stop import bounded_stop
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.fetch_order import POLL_RECORDS
from integr8s_idem.worker.fetch_watchdog import MOST_RENEWALS, PATIENCE, FetchWatchdog
from integr8s_idem.worker.health import ServiceHealth
from integr8s_idem.worker.isolation_gate import IsolationGate
from integr8s_idem.worker.kafka_protocols import Consumer, Partition
from integr8s_idem.worker.offset_committer import OffsetCommitter
from integr8s_idem.worker.partition_registry import PartitionRegistry
from integr8s_idem.worker.pipeline import Pipeline
from integr8s_idem.worker.poison_events import PoisonEventRunner
from integr8s_idem.worker.poller import POLL_BACKOFF, WATCH_SECONDS, Poller
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.purger import Purger
from integr8s_idem.worker.replay_policy import ReplayPolicy
from integr8s_idem.worker.retries import retries_of
from integr8s_idem.worker.slots import Slots
from integr8s_idem.worker.static_membership import StaticMembership, instance_id, is_fenced
from integr8s_idem.worker.store_circuit import StoreCircuit
from integr8s_idem.worker.tally import Tally

logger = logging.getLogger(__name__)

STALLED_AFTER: Final = 60.0
"""Seconds without a finished poll, in addition to those of a rebalance, after which the worker is not live."""

_NOT_READY: Final = {
    "starting": "waits until the group assigns partitions to its workers",
    "draining": "draining: waits for running handlers",
}
"""Why a live service is not ready, by its state, unless there is a more specific reason."""

LAST_GRACE: Final = 5.0
"""Seconds that cancelled handlers have to clean up."""


def _ping_of(dispatcher: EventDispatcher) -> Callable[[], Awaitable[StoreHealth]] | None:
    """Return a function that checks the store and the outbox; `None` for a service that does not wait for a store."""
    manager, outbox = dispatcher.manager, dispatcher.outbox
    if manager is None or not dispatcher.waits_for_store:
        return None
    repository = manager.measured_repository

    async def ping() -> StoreHealth:
        health = await repository.ping()
        if outbox is not None:
            await outbox.check()
        return health

    return ping


def make_consumer(settings: KafkaSettings, group: str) -> Consumer:
    """Create an aiokafka consumer without auto-commit and deserializers, with long timeouts for rebalances."""
    consumer: Consumer = AIOKafkaConsumer(
        **connection_options(settings),
        group_id=group,
        group_instance_id=settings.group_instance_id,
        enable_auto_commit=False,
        auto_offset_reset=settings.auto_offset_reset,
        isolation_level="read_committed",
        session_timeout_ms=int(settings.session_timeout_seconds * 1000),
        heartbeat_interval_ms=int(settings.heartbeat_interval_seconds * 1000),
        max_poll_interval_ms=int(settings.max_poll_interval_seconds * 1000),
        rebalance_timeout_ms=int(settings.rebalance_timeout_seconds * 1000),
        metadata_max_age_ms=int(settings.metadata_max_age_seconds * 1000),
        max_poll_records=POLL_RECORDS,
    )
    return consumer


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """The current state of a service."""

    name: str
    state: str
    """`starting`, `running`, `paused`, `draining`, `stopped` or `failed`."""
    partitions: int
    in_flight: int
    lag: int
    """Messages in its partitions after the committed offsets, as of the last poll."""
    tally: Tally
    reason: str = ""


class ServiceWorker:
    """Consumes the topics of one service until it is stopped."""

    def __init__(
        self,
        name: str,
        dispatcher: EventDispatcher,
        publisher: EventPublisher,
        kafka: KafkaSettings,
        service: ServiceSettings,
        *,
        group: str | None = None,
        isolation: IsolationGate | None = None,
        replay: ReplaySettings | None = None,
        consumer: Callable[[KafkaSettings, str], Consumer] = make_consumer,
        reach_brokers: Callable[[KafkaSettings], Awaitable[None]] | None = None,
        list_topics: Callable[[KafkaSettings, Collection[str]], Awaitable[Collection[str]]] | None = None,
        on_first_poll: Callable[[], None] = lambda: None,
        process: int = 1,
    ) -> None:
        """Create a worker, without opening connections.

        Args:
            group: Consumer group if the service's settings do not name one; by default, the service's name.
            isolation: Shared by the services of a process, to run events alone that may have crashed it.
            replay: Which replay headers are honored.
            consumer: Creates the Kafka client for a group.
            reach_brokers: Checks whether the brokers respond, while the store is unavailable.
            list_topics: Returns the topics that exist, given those that are wanted: to find retry topics that are
                missing, or that were removed from the settings.
            on_first_poll: Called when a client has polled for the first time, before its messages are handled.
            process: Number of this process among those of its supervisor.

        Raises:
            ApplicationError: The service has no topics, or its handlers and its retry topics do not match.
        """
        self.name = name
        self.group = service.group_id or group or name
        self.observer = dispatcher.observer
        self.topics = topics_read(service, dispatcher, publisher)
        if not self.topics:
            raise ApplicationError(
                f"service {name} has no topics: add a handler to its router, or set services.{name}.topics"
            )
        if kafka.group_instance_id is not None:
            own_id = instance_id(kafka.group_instance_id, name, process)
            kafka = kafka.model_copy(update={"group_instance_id": own_id})
        self.sources = self.topics
        """The topics of its events, without retry topics."""
        replay = replay or ReplaySettings()
        retries = retries_of(name, self.group, dispatcher, publisher, self.topics, service, kafka, replay)
        self._retry_topics = retries.topics if retries is not None else None
        self._retries = retries
        if self._retry_topics is not None:
            self.topics += tuple(topic.name for topic in self._retry_topics.all())
        self._list_topics = list_topics
        self._kafka = kafka
        self._service = service
        self._make_consumer = consumer
        self._reach_brokers = reach_brokers
        self._on_first_poll = on_first_poll
        manager = dispatcher.manager
        self._circuit = StoreCircuit(_ping_of(dispatcher), self.observer)
        self._purger = Purger(
            name, manager.measured_repository if manager is not None else None, self._circuit, self.observer
        )
        isolation = isolation or IsolationGate()
        self._processor = DeliveryProcessor(
            name,
            self.group,
            dispatcher,
            EventDecoder(dispatcher.router.events, codec_for(service, dispatcher)),
            publisher,
            self._circuit,
            Slots(service.concurrency),
            Backoff(service.retry_initial_seconds, service.retry_max_seconds),
            kafka.dead_letter_suffix,
            self.observer,
            ReplayPolicy(self.group, replay),
            retries,
            isolation,
            PoisonEventRunner(isolation, service.isolation_share, service.isolation_seconds, self.observer)
            if service.isolation_share
            else None,
        )
        self._partitions = PartitionRegistry(name, service.drain_timeout_seconds, self._retry_topics)
        self._backpressure = Backpressure(
            service.max_in_flight, service.max_in_flight_bytes, is_ordered=service.ordering != "none"
        )
        self._pipeline = Pipeline(
            self._processor, service.ordering, finish=self._finish, left=self._backpressure.remove, fail=self.fail
        )
        self._offsets = OffsetCommitter(name, kafka.request_timeout_seconds, self.observer)
        self._poller: Poller | None = None
        """Poller of the current client; `None` before the first."""
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joined = False
        observes = isinstance(dispatcher, ObservingEventDispatcher)
        self._mode = "only observes: duplicates are handled, and counted" if observes else ""
        self._phase = "starting"
        self._reason = ""

    # State.

    def stop(self) -> None:
        """Drain: start no more handlers, wait for those that run, commit, and leave the group."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    def fail(self, error: BaseException) -> None:
        """Stop because of a bug in the library, or of a rule for an error, rather than risk losing an event."""
        if not self._failed.done():
            self._failed.set_exception(error)

    @property
    def stuck(self) -> bool:
        """Whether cancelled handlers are still running: the event loop cannot end before they do."""
        return any(not task.done() for task in self._partitions.handlers())

    def report(self) -> ServiceReport:
        """Return the current state."""
        state = self._state
        return ServiceReport(
            self.name,
            "paused" if state == "running" and not self._circuit.is_available else state,
            len(self._partitions.assignments),
            self._backpressure.in_flight,
            self._partitions.lag(self._poller.consumer) if self._poller is not None else 0,
            self._processor.tally,
            self._why,
        )

    def health(self) -> ServiceHealth:
        """Return liveness and readiness: live while it polls, ready while it is in its group and the store responds."""
        # Before there is a client, it waits for the store; restarting the process would not help.
        silent = time.monotonic() - self._poller.last_poll if self._poller is not None else 0.0
        live = self._phase != "failed" and silent < self._longest_poll + WATCH_SECONDS
        ready = self._state == "running" and self._circuit.is_available
        reason = self._why or (_NOT_READY.get(self._state, "") if live else f"no poll has finished for {silent:.0f} s")
        return ServiceHealth(self.name, live, ready, reason)

    @property
    def _state(self) -> str:
        polled = self._joined and self._poller is not None and self._poller.polled
        return "running" if self._phase == "starting" and polled else self._phase

    @property
    def _why(self) -> str:
        # The broker's reason first, since the store's reason ends with a reference to its documentation.
        broker = self._reason or (self._poller.reason if self._poller is not None else "")
        return "; ".join(reason for reason in (broker, self._circuit.reason, self._mode) if reason)

    @property
    def _longest_poll(self) -> float:
        """Maximum seconds of a poll, which waits for rebalances."""
        return self._kafka.rebalance_timeout_seconds + STALLED_AFTER

    # Lifecycle.

    async def run(self) -> None:
        """Consume until `stop` is called.

        Raises:
            StoreConfigurationError: The store rejects the worker's configuration.
            KafkaError: The group cannot be consumed, for example because its offsets are out of range.
            MemberFencedError: Another worker has joined the group with the same `group_instance_id`.
            ServiceStoppedError: A handler failed with an error that stops the service.
        """
        for limit in limits_of_batches(self.name, self._service, self._processor.dispatcher.router.handlers):
            logger.warning("%s: %s", self.name, limit)
        try:
            await self._wait_for_store()
            self._purger.begin()
            await self._consume()
            self._phase = "stopped"
        except BaseException as error:
            self._phase, self._reason = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            await self._purger.stop()
            await self._circuit.stop()

    async def _wait_for_store(self) -> None:
        """Wait until the store has responded once; nothing is fetched before."""
        try:
            await self._circuit.check()
        except StoreUnavailableError as error:
            self._circuit.mark_unavailable(error)
            checking = asyncio.get_running_loop().create_task(self._check_brokers())
            try:
                await self._circuit.wait(unless=self._stopping)
            finally:
                checking.cancel()
                await asyncio.wait({checking})

    async def _check_brokers(self) -> None:
        """Report unavailable brokers, too, while the store is unavailable."""
        if self._reach_brokers is None:
            return
        for tries in itertools.count(1):
            try:
                await self._reach_brokers(self._kafka)
                self._reason = ""
            except BrokerUnavailableError as error:
                self._reason = self._unreachable(error.reason)
            await asyncio.sleep(POLL_BACKOFF.pause(tries))

    def _unreachable(self, why: object) -> str:
        return f"cannot reach Kafka at {self._kafka.bootstrap_servers}: {why}"

    async def _consume(self) -> None:
        """Consume until stopped; replace a broken client, at most `MOST_RENEWALS` times in a row."""
        renewals = failures = 0
        while poller := await self._join(PATIENCE * 2**renewals):
            await self._consume_with(poller)
            if not poller.broken.done():
                return
            reason = poller.broken.result()
            if poller.watchdog.fetched:
                renewals = failures = 0
            if poller.is_failure_temporary:
                failures += 1
                await asyncio.wait({self._stopping}, timeout=POLL_BACKOFF.pause(failures))
            else:
                renewals += 1
            if renewals > MOST_RENEWALS:
                raise KafkaError(f"the Kafka client does not fetch, nor did {MOST_RENEWALS} replacements: {reason}")
            logger.error("%s: replacing the broken Kafka client: %s", self.name, reason)

    async def _join(self, patience: float) -> Poller | None:
        """Join the group, and wait for brokers that are not available yet.  Returns `None` if stopped before.

        `patience` is the number of seconds without messages after which the client is checked.
        """
        tries = 0
        while not self._stopping.done():
            self._phase, self._joined = "starting", False
            poller = self._poller = self._new_poller(patience)
            await self._find_retry_topics()
            poller.consumer.subscribe(self.topics, listener=_Listener(self, poller.membership))
            try:
                joined = await self._start(poller.consumer)
            except (KafkaError, OSError) as error:
                if poller.membership is not None and is_fenced(error):
                    poller.membership.fenced()
                    await leave_group(poller.consumer, 1.0)
                    raise self._fenced() from error
                tries += 1
                self._reason = self._unreachable(error)
                logger.warning("%s: %s", self.name, self._reason)
                await leave_group(poller.consumer, 1.0)
                await asyncio.wait({self._stopping}, timeout=POLL_BACKOFF.pause(tries))
                continue
            if not joined:
                # Stopped while joining: the group may already include this consumer.
                await leave_group(poller.consumer, self._kafka.request_timeout_seconds)
                return None
            # A consumer that has joined must leave the group, even if the worker was stopped meanwhile.
            self._reason = ""
            poller.begin()
            return poller
        return None

    def _fenced(self) -> MemberFencedError:
        return MemberFencedError(self.group, self._kafka.group_instance_id or "")

    async def _find_retry_topics(self) -> None:
        """Subscribe to the retry topics that exist: the client does not start if one of its topics is missing.

        Those that are no longer in the settings are read, too, since copies may still wait there.
        """
        retries = self._retries
        if retries is None or self._list_topics is None:
            return
        wanted = [topic.name for topic in retries.topics.all()]
        try:
            existing = await self._list_topics(self._kafka, wanted)
        except BrokerUnavailableError as error:
            logger.warning("%s: cannot look for its retry topics: %s", self.name, error)
            return
        retired = [topic.name for topic in retries.topics.retired(existing)]
        missing = [name for name in wanted if name not in existing]
        if retired:
            logger.info("%s: also reads retry topics that were removed: %s", self.name, ", ".join(retired))
        if missing:
            logger.error(
                "%s: retry topics do not exist: %s. Their events wait in place, and hold up later ones: create the "
                "topics, and restart the workers",
                self.name,
                ", ".join(missing),
            )
        retries.missing = frozenset(missing)
        self.topics = (*self.sources, *(name for name in wanted if name not in missing), *retired)

    async def _start(self, consumer: Consumer) -> bool:
        """Start the consumer, and return whether it has joined; `False` if the worker was stopped before.

        Raises:
            TimeoutError: Joining takes too long.  It may never end if the coordinator moves meanwhile.
        """
        joining = asyncio.get_running_loop().create_task(bounded(consumer.start(), self._longest_poll))
        try:
            await asyncio.wait({joining, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            joining.cancel()
        if not joining.done():
            return False
        joining.result()
        return True

    def _new_poller(self, patience: float) -> Poller:
        return Poller(
            self.name,
            self._make_consumer(self._kafka, self.group),
            self._partitions,
            self._backpressure,
            FetchWatchdog(patience, self._kafka.request_timeout_seconds),
            self.observer,
            put=self._put,
            on_first_poll=self._on_first_poll,
            is_ordered=self._service.ordering != "none",
            hold=lambda: not self._circuit.is_available,
            answer_seconds=self._kafka.request_timeout_seconds,
            longest_poll=self._longest_poll,
            is_static=self._kafka.group_instance_id is not None,
        )

    async def _consume_with(self, poller: Poller) -> None:
        """Consume with one client until the worker is stopped or the client is broken."""
        work = (poller.poll(), poller.watch(), self._commit_loop(poller.consumer), self._measure_loop(poller.consumer))
        loops = [asyncio.get_running_loop().create_task(each) for each in work]
        try:
            ends: set[asyncio.Future[Any]] = {*loops, self._stopping, self._failed, poller.broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._drain(poller.consumer)
        finally:
            # If this task is cancelled, handlers must not run on after their resources are closed, nor start.
            self._partitions.close_all()
            last = {*loops, *self._partitions.handlers(), *self._pipeline.tasks}
            for task in last:
                task.cancel()
            await asyncio.wait(last, timeout=LAST_GRACE)
            if self.stuck:
                logger.error(
                    "%s: cancelled handlers are still running; their keys are released when their leases end", self.name
                )
            self._pipeline.abandon_all()
            # Tasks that were started by the last steps of those above.
            if rest := self._pipeline.tasks - last:
                for task in rest:
                    task.cancel()
                await asyncio.wait(rest, timeout=LAST_GRACE)
            self._partitions.end_all()
            await leave_group(poller.consumer, self._kafka.request_timeout_seconds)
        # None of the loops ends by itself: if one has ended, it has failed.
        for ended in (*loops, self._failed):
            if ended.done() and not ended.cancelled():
                if (error := ended.exception()) is not None and is_fenced(error):
                    raise self._fenced() from error
                ended.result()

    def abandon_all(self) -> None:
        """Start and retry no more deliveries, without waiting for those that run."""
        self._partitions.close_all()
        self._pipeline.abandon_all()

    async def _drain(self, consumer: Consumer) -> None:
        """Wait for running handlers, and release waiting deliveries.  Polling continues meanwhile."""
        self._phase = "draining"
        assignments = list(self._partitions.assignments.values())
        for assignment in assignments:
            assignment.close()
        self._pipeline.release_closed()
        await self._partitions.close(assignments)
        running = self._partitions.handlers()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LAST_GRACE)
        await self._offsets.commit(consumer, assignments)

    # Settling.

    def _put(self, deliveries: Sequence[Delivery]) -> None:
        self._backpressure.add(*deliveries)
        self._pipeline.put(deliveries)

    def _finish(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if not delivery.assignment.ended:
                delivery.assignment.progress.finish(delivery.record.offset)
                continue
            # Settled after the partition was revoked: its next owner will find the records (R2).
            self._processor.tally.stale += 1
            self.observer.count(Signal.STALE_COMPLETION, delivery.event_type)

    async def _commit_loop(self, consumer: Consumer) -> None:
        while True:
            await asyncio.sleep(self._service.commit_interval_seconds)
            await self._offsets.commit(consumer, self._partitions.assignments.values())

    # Rebalances.

    async def give_up(self, partitions: Iterable[Partition]) -> None:
        """Release revoked partitions: wait for their handlers, commit, and end the assignments (R12)."""
        self.observer.count(Signal.REBALANCE)
        held = self._partitions.assignments
        assignments = [held[partition] for partition in partitions if partition in held]
        assert self._poller is not None, "a client of this worker calls this"
        self._poller.watchdog.reset()
        for assignment in assignments:
            assignment.close()
        self._pipeline.release_closed()
        await self._partitions.close(assignments)
        await self._offsets.commit(self._poller.consumer, assignments)
        for assignment in assignments:
            self._partitions.end(assignment)

    def take_over(self, partitions: Iterable[Partition]) -> None:
        """Register assigned partitions; while draining, none of their deliveries is started."""
        for assignment in self._partitions.begin(partitions):
            if self._phase == "draining":
                assignment.close()
        self._joined = True
        if self._poller is not None:
            self._poller.watchdog.reset()

    # Metrics.

    async def _measure_loop(self, consumer: Consumer) -> None:
        loop = asyncio.get_running_loop()
        self.observer.measure(Gauge.NATIVE_CODE, speedups.native is not None)
        while True:
            due = loop.time() + 1.0
            await asyncio.sleep(1.0)
            self.observer.measure(Gauge.EVENT_LOOP_LAG, max(0.0, loop.time() - due))
            self.observer.measure(Gauge.IN_FLIGHT, self._backpressure.in_flight)
            self.observer.measure(Gauge.LIMIT_WAITING, self._pipeline.waiting_for_limits)
            for topic in self.topics:
                self.observer.measure(Gauge.CONSUMER_LAG, self._partitions.lag(consumer, topic), topic)


def codec_for(service: ServiceSettings, dispatcher: EventDispatcher) -> Codec | None:
    """Return the codec of the application or of the service's settings; `None` for native events."""
    codec = dispatcher.codec
    if codec is None and (service.envelope != "native" or service.event_id_header is not None):
        codec = codec_of(service.envelope, read_json)
    if codec is not None and service.event_id_header is not None:
        return IdFromHeader(codec, service.event_id_header)
    return codec


def topics_read(section: ServiceSettings, dispatcher: EventDispatcher, publisher: EventPublisher) -> tuple[str, ...]:
    """Return the topics in the service's settings, or those of its router's events."""
    return section.topics or tuple(publisher.topic_of(event_type_of(event)) for event in dispatcher.router.events)


class _Listener(ConsumerRebalanceListener):
    """Stops the service if a callback raises, since aiokafka only logs errors of listeners."""

    def __init__(self, worker: ServiceWorker, membership: StaticMembership | None) -> None:
        self._worker = worker
        self._membership = membership

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        try:
            await self._worker.give_up(Partition(*partition) for partition in revoked)
        except Exception as error:
            logger.exception("%s: cannot release partitions", self._worker.name)
            self._worker.fail(error)
            raise
        finally:
            # At the end: the client may also learn meanwhile that it is no longer a member.
            if self._membership is not None:
                self._membership.rejoins()

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        if self._membership is not None:
            self._membership.joined()
        self._worker.take_over(assigned)


async def leave_group(consumer: Consumer, seconds: float) -> None:
    """Leave the group, or let the session time out: `stop` may block or raise errors of the client (A6)."""
    try:
        await bounded_stop(consumer, seconds)
    except (KafkaError, OSError, TimeoutError) as error:
        logger.warning("consumer did not stop cleanly: %s: %s", type(error).__name__, error)
