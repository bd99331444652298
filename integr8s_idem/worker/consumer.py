"""`ServiceWorker`: polls, hands deliveries to lanes, moves offsets, gives partitions back.

It polls on whatever happens, so that long handlers never cost the membership.  aiokafka's sharp edges
and the rules that follow from them are in docs/explanation/worker.md; R numbers in comments refer to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka.errors import (
    KafkaError,
    NoOffsetForPartitionError,
    OffsetOutOfRangeError,
)

from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.dispatcher import EventDispatcher
from integr8s_idem.errors import ApplicationError, StoreUnavailableError
from integr8s_idem.events import EventDecoder, event_type_of
from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.worker.assignments import AbandonedError, Assignment, Delivery
from integr8s_idem.worker.clients import bounded, connection_options
from integr8s_idem.worker.committing import OffsetCommitter
from integr8s_idem.worker.gate import StoreGate
from integr8s_idem.worker.health import ServiceHealth
from integr8s_idem.worker.lanes import Lanes
from integr8s_idem.worker.pressure import Pressure
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.records import Consumer, Partition, Record
from integr8s_idem.worker.retries import Backoff
from integr8s_idem.worker.settling import Settler, Tally
from integr8s_idem.worker.watch import MOST_RENEWALS, PATIENCE, FetchWatch

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.2
"""Longest wait of one poll; also how late a stop is noticed."""

POLL_RECORDS: Final = 500
"""Most messages of one poll."""

STALLED_AFTER: Final = 60.0
"""Seconds without a finished poll, beyond a rebalance's, before the worker calls itself dead."""

SAME_FAILURES: Final = 3
"""Polls that fail in a row before a damaged partition is looked for."""

HOPELESS_FAILURES: Final = 10
"""Polls that fail in a row, for a reason that does not pass, before the client itself is taken for broken."""

WATCH_SECONDS: Final = 5.0
"""Pause between two looks at whether the client still fetches."""

LAST_GRACE: Final = 5.0
"""Seconds for cancelled handlers to clean up after themselves."""

POLL_BACKOFF: Final = Backoff(initial=0.2, longest=5.0)
"""Pauses after a poll that failed."""


def make_consumer(settings: KafkaSettings, group: str) -> Consumer:
    """aiokafka's consumer as the rules want it: no auto-commit, no deserializer, patient with rebalances."""
    consumer: Consumer = AIOKafkaConsumer(
        **connection_options(settings),
        group_id=group,
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
    """How a service is doing, at one moment."""

    name: str
    state: str
    """starting, running, paused, draining, stopped or failed."""
    partitions: int
    in_flight: int
    lag: int
    """Messages in its partitions behind what is committed, as far as the last poll knows."""
    tally: Tally
    reason: str = ""


class ServiceWorker:
    """Consumes the topics of one service until told to stop."""

    def __init__(
        self,
        name: str,
        dispatcher: EventDispatcher,
        publisher: EventPublisher,
        kafka: KafkaSettings,
        service: ServiceSettings,
        *,
        group: str | None = None,
        consumer: Callable[[KafkaSettings, str], Consumer] = make_consumer,
    ) -> None:
        self.name = name
        self.group = service.group_id or group or name
        self.observer = dispatcher.observer
        self.topics = service.topics or tuple(
            publisher.topic_of(event_type_of(event)) for event in dispatcher.router.events
        )
        if not self.topics:
            raise ApplicationError(f"service {name} reads no topic: its router has no handler, and none is set")
        self._kafka = kafka
        self._service = service
        self._make_consumer = consumer
        manager = dispatcher.manager
        self._gate = StoreGate(manager.repository.ping if manager is not None else None, self.observer)
        self._settler = Settler(
            name,
            self.group,
            dispatcher,
            EventDecoder(dispatcher.router.events),
            publisher,
            self._gate,
            asyncio.Semaphore(service.concurrency),
            Backoff(service.retry_initial_seconds, service.retry_max_seconds),
            kafka.dead_letter_suffix,
            self.observer,
        )
        self._lanes = Lanes(service.ordering, self._settle)
        self._assignments: dict[Partition, Assignment] = {}
        self._in_flight = 0
        self._bytes = 0
        self._pressure = Pressure(service.max_in_flight, service.max_in_flight_bytes)
        self._leftover: set[asyncio.Task[Any]] = set()
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offsets = OffsetCommitter(name, kafka.request_timeout_seconds, self.observer)
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joined = False
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watch = FetchWatch(PATIENCE, kafka.request_timeout_seconds)
        self._last_poll = time.monotonic()
        self._state = "starting"
        self._reason = ""

    # What others ask.

    def stop(self) -> None:
        """Drain: begin nothing more, let running handlers end, commit, leave."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    def fail(self, error: Exception) -> None:
        """Something of ours is broken: stop rather than lose an event."""
        if not self._failed.done():
            self._failed.set_exception(error)

    @property
    def stuck(self) -> bool:
        """Whether handlers run on that were cancelled: the event loop cannot end before they do."""
        return any(not task.done() for task in self._handlers())

    def report(self) -> ServiceReport:
        """How it is doing now."""
        state = "paused" if self._state == "running" and not self._gate.is_open else self._state
        return ServiceReport(
            self.name,
            state,
            len(self._assignments),
            self._in_flight,
            self._lag_of(self._assignments.values()),
            self._settler.tally,
            self._gate.reason or self._reason,
        )

    def health(self) -> ServiceHealth:
        """Live while it polls; ready while it has joined its group and the store answers."""
        silent = time.monotonic() - self._last_poll
        live = self._state != "failed" and silent < self._longest_poll + WATCH_SECONDS
        ready = self._state == "running" and self._gate.is_open
        reason = self._gate.reason or self._reason or ("" if live else f"no poll has ended for {silent:.0f} s")
        return ServiceHealth(self.name, live, ready, reason)

    @property
    def _longest_poll(self) -> float:
        """Seconds that a poll may take: a rebalance holds it up."""
        return self._kafka.rebalance_timeout_seconds + STALLED_AFTER

    # Its life.

    async def run(self) -> None:
        """Consume until `stop` is called.

        Raises:
            StoreConfigurationError: The store refuses us.
            KafkaError: The group cannot be consumed, for example because its offsets are gone.
        """
        try:
            await self._wait_for_store()
            if not self._stopping.done():
                await self._consume()
            self._state = "stopped"
        except BaseException as error:
            self._state, self._reason = "failed", f"{type(error).__name__}: {error}"
            raise
        finally:
            await self._gate.stop()

    async def _wait_for_store(self) -> None:
        """Nothing is fetched before the store has answered once."""
        try:
            await self._gate.check()
        except StoreUnavailableError as error:
            self._gate.close(error)
            await self._gate.wait(unless=self._stopping)

    async def _consume(self) -> None:
        """Consume until told to stop; a client that is broken is replaced, a few times."""
        renewals = 0
        while await self._join():
            await self._consume_once()
            if not self._broken.done():
                return
            reason = self._broken.result()
            renewals = 1 if self._watch.fetched else renewals + 1
            if renewals > MOST_RENEWALS:
                raise KafkaError(f"the client does not fetch, and {MOST_RENEWALS} new ones did not either: {reason}")
            logger.error("%s: the Kafka client is broken, a new one takes its place: %s", self.name, reason)
            self._renew(PATIENCE * 2**renewals)

    def _renew(self, patience: float) -> None:
        self._broken = asyncio.get_running_loop().create_future()
        self._watch = FetchWatch(patience, self._kafka.request_timeout_seconds)
        self._joined, self._state = False, "starting"

    def _give_client_up(self, reason: str) -> None:
        if not self._broken.done():
            self._broken.set_result(reason)

    async def _consume_once(self) -> None:
        """Consume with one client until told to stop, or until it is broken."""
        work = (self._commit_loop(), self._measure_loop(), self._watch_loop())
        helpers = [asyncio.get_running_loop().create_task(loop) for loop in work]
        poll = asyncio.get_running_loop().create_task(self._poll_loop())
        try:
            ends: set[asyncio.Future[Any]] = {poll, self._stopping, self._failed, self._broken}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            # Stopped at once, it leaves no handler behind that runs on without what it was given.
            for task in (poll, *helpers, *self._handlers()):
                task.cancel()
            await asyncio.wait({poll, *helpers, *self._handlers()}, timeout=LAST_GRACE)
            if self.stuck:
                logger.error(
                    "%s: handlers were cancelled and do not end; their keys are free when their leases end", self.name
                )
            self._leftover |= self._handlers()
            await self._leave()
        if poll.done() and not poll.cancelled() and poll.exception() is not None:
            raise poll.exception()  # type: ignore[misc]  # just seen not to be None
        if self._failed.done():
            self._failed.result()

    async def _join(self) -> bool:
        """Join the group; brokers that are not there yet are waited for.  `False`: told to stop before."""
        tries = 0
        while not self._stopping.done():
            self._consumer = self._make_consumer(self._kafka, self.group)
            self._consumer.subscribe(self.topics, listener=_Listener(self))
            try:
                # It waits for the group, and may do so for ever if the coordinator moves meanwhile.
                await bounded(self._consumer.start(), self._longest_poll)
            except (KafkaError, OSError) as error:
                tries += 1
                self._last_poll = time.monotonic()  # alive: to start it anew would bring no broker back
                self._reason = f"cannot reach Kafka at {self._kafka.bootstrap_servers}: {error}"
                logger.warning("%s: %s", self.name, self._reason)
                await bounded_stop(self._consumer, 1.0)
                await asyncio.wait({self._stopping}, timeout=POLL_BACKOFF.pause(tries))
                continue
            # A consumer that has started must be left, even if we were told to stop meanwhile.
            self._reason = ""
            self._last_poll = time.monotonic()
            self._watch.stir()
            return True
        return False

    async def _drain(self) -> None:
        """Running handlers may end; what waits is let go and comes again.  The poll loop goes on meanwhile."""
        self._state = "draining"
        assignments = list(self._assignments.values())
        await self._close(assignments)
        running = self._handlers()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LAST_GRACE)
        await self._offsets.commit(self._consumer, assignments)

    def _handlers(self) -> set[asyncio.Task[Any]]:
        """What handles deliveries, those of partitions given up included."""
        return {task for assignment in self._assignments.values() for task in assignment.tasks} | self._leftover

    async def _leave(self) -> None:
        self._assignments.clear()
        await bounded_stop(self._consumer, self._kafka.request_timeout_seconds)

    # Fetching.

    async def _poll_loop(self) -> None:
        failures = 0
        while True:
            self._apply_pressure()
            room = max(1, min(POLL_RECORDS, self._service.max_in_flight - self._in_flight))
            try:
                await self._note_starts()
                batches = await self._consumer.getmany(timeout_ms=int(POLL_SECONDS * 1000), max_records=room)
            except (NoOffsetForPartitionError, OffsetOutOfRangeError):
                raise  # where to go on is for people to say, not for us to guess
            except Exception as error:  # noqa: BLE001  # a damaged batch raises what its codec likes
                failures += 1
                await self._poll_failed(error, failures)
                continue
            if failures:
                failures, self._reason = 0, ""
            self._last_poll = time.monotonic()
            if self._joined and self._state == "starting":
                self._state = "running"
            self._take(batches)

    async def _poll_failed(self, error: Exception, failures: int) -> None:
        self._last_poll = time.monotonic()
        self._watch.stir()
        self._reason = f"poll failed: {type(error).__name__}: {error}"
        logger.warning("%s: %s", self.name, self._reason)
        self._rewind()
        passing = isinstance(error, KafkaError) and error.retriable
        if not passing and failures >= HOPELESS_FAILURES:
            self._give_client_up(self._reason)
        elif not passing and failures >= SAME_FAILURES:
            await self._set_damaged_aside()
        await asyncio.sleep(POLL_BACKOFF.pause(failures))

    async def _set_damaged_aside(self) -> None:
        """A batch that cannot be read fails every poll: find its partition, let it rest, go on with the others (A9)."""
        for partition, assignment in list(self._assignments.items()):
            if assignment.damaged or assignment.closed or partition not in self._consumer.assignment():
                continue
            try:
                batches = await self._consumer.getmany(
                    partition, timeout_ms=int(POLL_SECONDS * 1000), max_records=POLL_RECORDS
                )
            except Exception as error:  # noqa: BLE001  # as above
                if type(error) is KafkaError:
                    return  # the client speaks of itself, not of a message
                assignment.damaged = True
                self.observer.count(Signal.PARTITION_DAMAGED)
                logger.error(  # no bug of ours
                    "%s: %s[%d] cannot be read from offset %s on and rests; others go on: %s",
                    self.name,
                    partition.topic,
                    partition.partition,
                    assignment.progress.next_offset or assignment.start,
                    f"{type(error).__name__}: {error}",
                )
            else:
                self._take(batches)
        self._rewind()

    def _take(self, batches: Any) -> None:
        """Note what has come before anything is awaited (R1)."""
        if batches:
            self._watch.stir(fetched=True)
        for partition, records in batches.items():
            assignment = self._assignments.get(partition)
            if assignment is None or assignment.closed:
                continue  # not ours any more, or not to be begun: it comes again
            expected = assignment.progress.next_offset
            if records and expected is not None and records[0].offset < expected:
                assignment = self._begin_anew(assignment, records[0].offset)
            for record in records:
                self._take_one(assignment, record)

    def _begin_anew(self, old: Assignment, offset: int) -> Assignment:
        """Take `old` for over, and begin at `offset`.

        We never seek back behind what was delivered.  So the log is another one, whose offsets mean other
        messages: its topic was made anew under the same name, or it has lost its end.
        """
        logger.error(
            "%s: %s[%d] went back from offset %s to %d: the topic was made anew, or has lost messages; "
            "what it holds now is handled from there",
            self.name,
            old.partition.topic,
            old.partition.partition,
            old.progress.next_offset,
            offset,
        )
        self._end(old)
        assignment = self._assignments[old.partition] = Assignment(old.partition, start=offset)
        return assignment

    def _end(self, assignment: Assignment) -> None:
        """Handlers that still run keep their leases and complete by token, but move no offset."""
        assignment.close()
        assignment.ended = True
        for task in assignment.tasks:
            self._leftover.add(task)
            task.add_done_callback(self._leftover.discard)

    def _take_one(self, assignment: Assignment, record: Record) -> None:
        if not assignment.progress.deliver(record.offset):
            return
        delivery = Delivery(record, assignment)
        self._in_flight += 1
        self._bytes += delivery.size
        self._lanes.put(delivery)

    async def _note_starts(self) -> None:
        """Learn where new assignments begin, to have a place to go back to when a poll fails."""
        unknown = [a for a in self._assignments.values() if a.start is None and not a.closed]
        for assignment in unknown:
            try:
                assignment.start = await bounded(
                    self._consumer.position(assignment.partition), self._kafka.request_timeout_seconds
                )
            except (KafkaError, TimeoutError):
                return  # not known yet, or no longer ours: asked again at the next poll

    def _rewind(self) -> None:
        """A failed `getmany` loses what it had already taken from other partitions: fetch all of it again."""
        for assignment in self._assignments.values():
            offset = assignment.progress.next_offset
            offset = assignment.start if offset is None else offset
            if offset is None or assignment.partition not in self._consumer.assignment():
                continue
            self._consumer.seek(assignment.partition, offset)

    def _apply_pressure(self) -> None:
        self._pressure.apply(
            self._consumer, self._assignments, self._in_flight, self._bytes, hold=not self._gate.is_open
        )

    # Settling.

    async def _settle(self, delivery: Delivery) -> None:
        try:
            if delivery.assignment.closed:
                return
            await self._settler.settle(delivery)
        except AbandonedError:
            return
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # A bug of ours: better a stopped service than a lost event.
            logger.exception("%s: a delivery could not be settled", self.name)
            self.fail(error)
            delivery.assignment.close()
        else:
            self._finish(delivery)
        finally:
            self._in_flight -= 1
            self._bytes -= delivery.size

    def _finish(self, delivery: Delivery) -> None:
        if delivery.assignment.ended:
            # Settled after the partition was gone: its next owner will find that out (R2).
            self._settler.tally.stale += 1
            self.observer.count(Signal.STALE_COMPLETION)
        else:
            delivery.assignment.progress.finish(delivery.record.offset)

    # Offsets.

    async def _commit_loop(self) -> None:
        while True:
            await asyncio.sleep(self._service.commit_interval_seconds)
            await self._offsets.commit(self._consumer, self._assignments.values())

    # Rebalances.

    async def give_up(self, partitions: Iterable[Partition]) -> None:
        """Partitions are being taken away: let handlers end, commit, and forget (R12)."""
        self.observer.count(Signal.REBALANCE)
        self._watch.stir()
        assignments = [self._assignments[p] for p in partitions if p in self._assignments]
        await self._close(assignments)
        await self._offsets.commit(self._consumer, assignments)
        for assignment in assignments:
            self._end(assignment)
            self._assignments.pop(assignment.partition, None)

    def take_over(self, partitions: Iterable[Partition]) -> None:
        """Partitions are ours from now on."""
        for partition in partitions:
            self._assignments[Partition(*partition)] = Assignment(Partition(*partition))
        self._joined = True
        self._watch.stir()
        logger.info("%s: partitions that are ours now: %d", self.name, len(self._assignments))

    async def _close(self, assignments: Collection[Assignment]) -> None:
        for assignment in assignments:
            assignment.close()
        running = {task for assignment in assignments for task in assignment.tasks}
        if running:
            await asyncio.wait(running, timeout=self._service.drain_timeout_seconds)

    # Watching the client, and measuring.

    async def _watch_loop(self) -> None:
        """Notice a client that fetches no more (A5)."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            silent = time.monotonic() - self._last_poll
            if silent > self._longest_poll:
                self._give_client_up(f"no poll has ended for {silent:.0f} s")
                return
            awake = self._assignments.keys() - self._pressure.resting
            if reason := await self._watch.doubt(self._consumer, awake):
                self._give_client_up(reason)
                return

    async def _measure_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 1.0
            await asyncio.sleep(1.0)
            self.observer.measure(Gauge.EVENT_LOOP_LAG, max(0.0, loop.time() - due))
            self.observer.measure(Gauge.IN_FLIGHT, self._in_flight)
            for topic in self.topics:
                lag = self._lag_of(a for a in self._assignments.values() if a.partition.topic == topic)
                self.observer.measure(Gauge.CONSUMER_LAG, lag, topic)

    def _lag_of(self, assignments: Iterable[Assignment]) -> int:
        return sum(map(self._lag, assignments))

    def _lag(self, assignment: Assignment) -> int:
        done = assignment.progress.committed
        done = assignment.start if done is None else done
        if done is None or assignment.partition not in self._consumer.assignment():
            return 0
        end = self._consumer.highwater(assignment.partition)
        return max(0, end - done) if end is not None else 0


class _Listener(ConsumerRebalanceListener):
    """aiokafka swallows what a listener raises: it is told here, and stops the service."""

    def __init__(self, worker: ServiceWorker) -> None:
        self._worker = worker

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        await self._told(self._worker.give_up(Partition(*partition) for partition in revoked))

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        self._worker.take_over(assigned)

    async def _told(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            logger.exception("%s: giving partitions back failed", self._worker.name)
            self._worker.fail(error)
            raise


async def bounded_stop(consumer: Consumer, seconds: float) -> None:
    """Leave the group, or let the session end it: `stop` may block or raise what is not ours (A6)."""
    try:
        await bounded(consumer.stop(), seconds)
    except (KafkaError, OSError, TimeoutError) as error:
        logger.warning("consumer did not stop cleanly: %s: %s", type(error).__name__, error)
