"""Bugs injected into the real code, to prove that the simulation finds them.

Each is a context manager that patches one thing; `BUGS` lists them by name. Most of them were real bugs; see
docs/decisions/0018.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final
from unittest import mock

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem.config import OnInProgress
from integr8s_idem.engine.leases import HeldLease, LeaseKeeper
from integr8s_idem.engine.reconciliation import ask
from integr8s_idem.engine.run import Run
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.work import Attempt, Discarded, Executed, HandlerFailed
from integr8s_idem.errors import StoreError
from integr8s_idem.failures import FailureRule
from integr8s_idem.handlers.handler import GuardedExecution, IdempotentEventHandler
from integr8s_idem.handlers.handler_calls import HandlerCall
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.handlers.reconciliation import ReconcilingEventHandler
from integr8s_idem.records import IdempotencyStatus, InProgress, Previous, Reserved, ReserveRequest, Verdict
from integr8s_idem.stores import memory
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import DeliveryOutcome
from integr8s_idem.worker import retries
from integr8s_idem.worker.assignments import AbandonedError, Assignment, Delivery, WorkItem
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.conclusions import Conclusions
from integr8s_idem.worker.delivery_processor import DeliveryProcessor
from integr8s_idem.worker.look_ahead import Reservable
from integr8s_idem.worker.offset_committer import OffsetCommitter
from integr8s_idem.worker.offset_progress import Progress
from integr8s_idem.worker.partition_registry import PartitionRegistry
from integr8s_idem.worker.pipeline import Pipeline
from integr8s_idem.worker.poller import Poller
from integr8s_idem.worker.retries import Retries
from integr8s_idem.worker.retry_copies import RetryCopy, copy_of
from tests.simulation.store import Server, SimulatedStoreClient
from tests.simulation.workload import SCOPE

Bug = Callable[[], AbstractContextManager[Any]]


def _patched(owner: object, name: str, replacement: object) -> AbstractContextManager[Any]:
    return mock.patch.object(owner, name, replacement)


# Store


def no_token_check() -> AbstractContextManager[Any]:
    """Complete, renew and release do not check the token while the key is being processed."""

    def held(self: Any, reservation: Reserved, now: datetime) -> Any:
        entry = self._living(reservation.key, now)
        return entry if entry is not None and entry.status is IdempotencyStatus.PROCESSING else None

    return _patched(MemoryIdempotencyRepository, "_held", held)


def unconditional_outcome() -> AbstractContextManager[Any]:
    """An outcome overwrites the record in any state, including an earlier outcome."""

    def held(self: Any, reservation: Reserved, now: datetime) -> Any:
        return self._living(reservation.key, now)

    def settle(self: Any, *arguments: Any) -> Any:
        with _patched(MemoryIdempotencyRepository, "_held", held):
            return settled(self, *arguments)

    settled = MemoryIdempotencyRepository._settle
    return _patched(MemoryIdempotencyRepository, "_settle", settle)


def unconditional_delete() -> AbstractContextManager[Any]:
    """A failed run deletes the record, even if another run owns it now."""

    def release(self: Any, reservation: Reserved, now: datetime) -> bool:
        return self._entries.pop(reservation.key, None) is not None

    return _patched(MemoryIdempotencyRepository, "_release", release)


@contextmanager
def record_shorter_than_lease() -> Iterator[None]:
    """The record expires while its run is in progress."""

    def renew(self: Any, reservation: Reserved, now: datetime, lease: timedelta) -> bool:
        entry = self._held(reservation, now)
        if entry is not None:
            entry.lease_until = now + lease
        return entry is not None

    with (
        _patched(memory, "_life", lambda request: request.lease / 5),
        _patched(MemoryIdempotencyRepository, "_renew", renew),
    ):
        yield


def clock_of_the_worker() -> AbstractContextManager[Any]:
    """Leases are compared with the clock of the worker."""
    original = Server.now

    def now(self: Server) -> datetime:
        return original(self) + timedelta(seconds=self.asker_is_ahead)

    return _patched(Server, "now", now)


def reserve_not_repeatable() -> AbstractContextManager[Any]:
    """After a lost answer, the caller gets its own reservation reported as in progress elsewhere."""
    original = MemoryIdempotencyRepository._reserve

    def reserve(self: Any, request: ReserveRequest, now: datetime) -> Verdict:
        entry = self._living(request.key, now)
        if entry is not None and entry.token == request.token and entry.lease_until is not None:
            left = entry.lease_until - now
            return InProgress(key=request.key, attempt=entry.attempt, retry_after=max(left, timedelta(0)))
        return original(self, request, now)

    return _patched(MemoryIdempotencyRepository, "_reserve", reserve)


def check_then_act() -> AbstractContextManager[Any]:
    """A takeover reads the record and writes it later, without checking it again."""
    original = SimulatedStoreClient.reserve

    async def reserve(self: SimulatedStoreClient, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        server = self.server
        before = await self._call("get", lambda: [server.seen(request.key) for request in requests])
        now = server.now()
        free = [seen is None or (seen.open and (seen.lease_until or now) <= now) for seen in before]
        if not all(free):
            return await original(self, requests)

        def take(request: ReserveRequest, seen: Any) -> Verdict:
            last = server.inner._entries.get(request.key) if seen is not None else None
            previous = Previous.LAPSED if last is not None else Previous.NONE
            now, there = server.now(), server.seen(request.key)
            verdict = server.inner._take(request, now, last, previous)
            server._check_reserved(request, there, verdict, now)
            return verdict

        return await self._call("set", lambda: [take(*pair) for pair in zip(requests, before, strict=True)])

    return _patched(SimulatedStoreClient, "reserve", reserve)


# Manager and leases


def no_deadline_of_the_lease() -> AbstractContextManager[Any]:
    """A run continues after its lease has ended."""

    def enter(self: HeldLease) -> HeldLease:
        Deadline.__enter__(self)
        self.reschedule(None)
        self._keeper.take(self)
        return self

    def renewed(self: HeldLease, asked_at: float, lease: timedelta) -> None:
        times = self._keeper.times_of(lease, asked_at)
        self.start_before, self.deadline, self.renew_at = times.start_before, times.end, times.renew_at

    return mock.patch.multiple(HeldLease, __enter__=enter, renewed=renewed, lose=lambda self: None)


def no_check_before_a_start() -> AbstractContextManager[Any]:
    """A handler starts without checking whether its lease still holds."""
    return _patched(HeldLease, "is_late", lambda self: False)


def every_crash_counts() -> AbstractContextManager[Any]:
    """Events that run concurrently with an event that kills its process are blamed as well."""

    def crashed_too_often(self: Run, reserved: Reserved) -> bool:
        return reserved.previous is Previous.LAPSED and reserved.attempt > self.services.config.max_attempts

    return _patched(Run, "_crashed_too_often", crashed_too_often)


def no_renewal() -> AbstractContextManager[Any]:
    """Leases are never renewed, and runs are not canceled when they end."""

    @contextmanager
    def both() -> Iterator[None]:
        async def never(self: LeaseKeeper, duration: timedelta, leases: list[HeldLease]) -> None:
            for lease in leases:
                lease.renew_at = math.inf

        with no_deadline_of_the_lease(), _patched(LeaseKeeper, "_renew", never):
            yield

    return both()


def key_made_again() -> AbstractContextManager[Any]:
    """The key is derived again at each attempt, after the handler may have changed the event."""
    original = Pipeline._prepare

    def prepare(self: Pipeline, item: WorkItem, asked: list[Reservable]) -> None:
        execution = item.execution
        if isinstance(execution, GuardedExecution):
            handler: Any = execution.handler
            execution.work.key = handler.resolver.resolve(handler.name, execution.event, execution.generation).key
        original(self, item, asked)

    return _patched(Pipeline, "_prepare", prepare)


def completed_before_the_handler() -> AbstractContextManager[Any]:
    """The outcome is written before the handler runs."""
    original = Run.call

    async def call(self: Run, function: Any) -> Any:
        assert self.lease is not None
        client = self.services.client
        await client.complete(client.completion(self.lease.reservation, "done", self.work.ttl))
        return await original(self, function)

    return _patched(Run, "call", call)


def token_of_the_process() -> AbstractContextManager[Any]:
    """All runs of a process share a token, so that a second run of a key takes the reservation of the first."""
    one, many = StoreClient.request, StoreClient.requests

    def request(self: StoreClient, work: Any) -> ReserveRequest:
        return replace(one(self, work), token=self._owner.encode().ljust(16)[:16])

    def requests(self: StoreClient, works: Any) -> list[ReserveRequest]:
        return [replace(each, token=self._owner.encode().ljust(16)[:16]) for each in many(self, works)]

    return mock.patch.multiple(StoreClient, request=request, requests=requests)


# Worker


def acknowledge_in_progress() -> AbstractContextManager[Any]:
    """A duplicate of work in progress is acknowledged."""
    return _patched(GuardedExecution, "on_in_progress", property(lambda _: OnInProgress.SKIP))


def watermark_off_by_one() -> AbstractContextManager[Any]:
    """The offset of the first unfinished delivery counts as finished."""

    def committable(self: Progress) -> int | None:
        return self._delivered[0] + 1 if self._delivered else self._next

    return _patched(Progress, "committable", property(committable))


def highest_finished() -> AbstractContextManager[Any]:
    """The highest finished offset is committed, not the lowest unfinished one."""
    original = Progress.finish

    def finish(self: Progress, *offsets: int) -> None:
        while self._delivered and self._delivered[0] <= max(offsets):
            self._delivered.popleft()
        original(self, *offsets)

    return _patched(Progress, "finish", finish)


def epoch_ignored() -> AbstractContextManager[Any]:
    """A reassigned partition continues with the state that it had when it was lost."""
    end, begin = PartitionRegistry.end, PartitionRegistry.begin
    lost: dict[tuple[int, Any], Progress] = {}

    def remembering(self: PartitionRegistry, assignment: Assignment) -> None:
        lost[id(self), assignment.partition] = assignment.progress
        end(self, assignment)

    def going_on(self: PartitionRegistry, partitions: Iterable[Any]) -> None:
        assigned = list(partitions)
        begin(self, assigned)
        for partition in assigned:
            if (id(self), partition) in lost:
                self.assignments[partition].progress = lost[id(self), partition]

    return mock.patch.multiple(PartitionRegistry, end=remembering, begin=going_on)


def no_seek_after_a_failed_poll() -> AbstractContextManager[Any]:
    """A failed poll is repeated without seeking back to the messages that it lost."""
    return _patched(Poller, "_rewind", lambda self: True)


def position_of_the_client() -> AbstractContextManager[Any]:
    """The client's position is read at the commit, when a poll may have moved it past unregistered deliveries."""
    original = OffsetCommitter.commit

    async def commit(self: OffsetCommitter, consumer: Any, assignments: Iterable[Assignment]) -> None:
        held = list(assignments)
        for assignment in held:
            if assignment.partition in consumer.assignment():
                assignment.progress.fetched_to(await consumer.position(assignment.partition), 0)
        await original(self, consumer, held)

    return _patched(OffsetCommitter, "commit", commit)


def position_of_a_closing_assignment() -> AbstractContextManager[Any]:
    """The position is recorded although the messages fetched for a closing assignment are dropped."""

    async def note(self: Poller) -> None:
        for partition, assignment in self._partitions.assignments.items():
            if partition in self.consumer.assignment():
                assignment.progress.fetched_to(await self.consumer.position(partition), assignment.start or 0)

    return _patched(Poller, "_note_positions", note)


def position_past_what_runs() -> AbstractContextManager[Any]:
    """The position is committed although deliveries before it are unfinished."""

    def committable(self: Progress) -> int | None:
        return self._next

    return _patched(Progress, "committable", property(committable))


def abandoned_is_finished() -> AbstractContextManager[Any]:
    """Deliveries that are dropped in a rebalance count as finished."""
    original = Pipeline._ended

    def ended(self: Pipeline, deliveries: Sequence[Delivery], may_commit: bool) -> None:  # the original's signature
        for delivery in deliveries:
            original(self, (delivery,), may_commit or delivery.assignment.closed)

    return _patched(Pipeline, "_ended", ended)


def acknowledged_in_an_outage() -> AbstractContextManager[Any]:
    """A delivery is acknowledged if the store does not answer."""

    original = Conclusions.raised

    def raised(self: Conclusions, item: WorkItem, error: Exception) -> None:
        if isinstance(error, StoreError):
            self.conclude(item, Executed(None, 1))
        else:
            original(self, item, error)

    return _patched(Conclusions, "raised", raised)


def failed_without_a_dead_letter() -> AbstractContextManager[Any]:
    """A delivery that is given up is acknowledged without a dead letter."""

    async def nothing(self: DeliveryProcessor, *_: Any) -> None: ...

    return _patched(DeliveryProcessor, "dead_letter", nothing)


def dead_letter_after_the_offset() -> AbstractContextManager[Any]:
    """The dead letter is sent in the background, while the offset is committed."""
    original = DeliveryProcessor.dead_letter

    async def in_background(self: DeliveryProcessor, *arguments: Any) -> None:
        async def later() -> None:
            await asyncio.sleep(1.5)
            await original(self, *arguments)

        delivery: Delivery = arguments[0]
        delivery.add_task(asyncio.get_running_loop().create_task(later()))

    return _patched(DeliveryProcessor, "dead_letter", in_background)


# Rules for failures, and versions of the code


def discarded_without_a_record() -> AbstractContextManager[Any]:
    """A discarded event is acknowledged before its record is completed."""

    async def discard(self: Run, lease: HeldLease, error: Exception) -> Discarded:
        return Discarded(error, lease.reservation.attempt)

    return _patched(Run, "_discard", discard)


def stopping_event_is_acknowledged() -> AbstractContextManager[Any]:
    """The event that stops its service is acknowledged."""
    original = Conclusions._stop

    def stop(self: Conclusions, item: WorkItem, failed: HandlerFailed) -> None:
        with _patched(Conclusions, "abandon", Conclusions._done), _patched(Assignment, "close", lambda _: None):
            original(self, item, failed)

    return _patched(Conclusions, "_stop", stop)


def own_attempts_ignored() -> AbstractContextManager[Any]:
    """A rule with attempts of its own gives up after those of the service."""

    def is_last(self: FailureRule, attempt: int, max_attempts: int) -> bool:
        return attempt >= max_attempts

    return _patched(FailureRule, "is_last", is_last)


def delay_ignored() -> AbstractContextManager[Any]:
    """A retry does not wait for the delay of its rule."""

    def pause(self: Backoff, rule: FailureRule | None, tries: int) -> float:
        return self.pause(tries)

    return _patched(Backoff, "pause_by", pause)


def fields_of_fingerprints_ignored() -> AbstractContextManager[Any]:
    """Fingerprints are compared although they were computed from different fields."""

    def is_other(stored: bytes | None, offered: bytes | None) -> bool:
        return stored is not None and offered is not None and stored != offered

    return _patched(memory, "is_other_payload", is_other)


def offset_first() -> AbstractContextManager[Any]:
    """A delivery counts as finished when it starts."""
    original = Pipeline._begin

    def begin(self: Pipeline, delivery: Delivery, *arguments: Any) -> None:
        self._finish((delivery,))
        original(self, delivery, *arguments)

    return _patched(Pipeline, "_begin", begin)


# Reconcile functions


def never_reconciled() -> AbstractContextManager[Any]:
    """A reconcile function is never asked."""
    return _patched(ReconcilingEventHandler, "work", IdempotentEventHandler.work)


def reconciled_without_events() -> AbstractContextManager[Any]:
    """The events of a reconcile function are not published."""

    async def find_effect(self: Any, execution: Any, attempt: Attempt, _: bool) -> Any:
        call = HandlerCall(execution.event, attempt, Outgoing())
        return await ask(lambda _: self._asked.call(call), attempt, self.observer)

    return _patched(ReconcilingEventHandler, "_find_effect", find_effect)


# Retry topics


def offset_before_the_copy() -> AbstractContextManager[Any]:
    """The offset moves while the copy is published in the background."""

    def retry_later(self: Conclusions, item: WorkItem, copies: Retries, attempt: int, due_in: timedelta) -> None:
        publishing = copies.publish(item.delivery, item.execution, attempt, due_in)  # type: ignore[arg-type]  # guarded
        item.delivery.add_task(asyncio.get_running_loop().create_task(publishing))
        self._settle(item, DeliveryOutcome.RETRY_LATER, attempt)

    return _patched(Conclusions, "_retry_later", retry_later)


def attempt_of_the_copy_ignored() -> AbstractContextManager[Any]:
    """The attempt in the headers of a copy does not count if its record has vanished."""
    original = DeliveryProcessor._decode_copy

    def decode_copy(self: DeliveryProcessor, delivery: Delivery, copies: Retries) -> Any:
        decoded = original(self, delivery, copies)
        for execution in decoded.executions:
            if isinstance(execution, GuardedExecution):
                execution.work.copied_attempt = 0
        return decoded

    return _patched(DeliveryProcessor, "_decode_copy", decode_copy)


def overtaken_in_place() -> AbstractContextManager[Any]:
    """An event that is scheduled waits in place, although its handler may be overtaken."""

    async def wait(self: Retries, delivery: Delivery, _: Any, attempt: int, remaining: timedelta) -> bool:
        await asyncio.wait({delivery.assignment.closing}, timeout=remaining.total_seconds())
        if delivery.assignment.closed:
            raise AbandonedError
        return False

    return _patched(Retries, "publish", wait)


def scheduled_without_a_delay() -> AbstractContextManager[Any]:
    """A release with a delay is a release: a duplicate runs the event at once."""

    def schedule(self: Any, reservation: Reserved, now: datetime, *_: timedelta) -> bool:
        return self._release(reservation, now)  # type: ignore[no-any-return]

    return _patched(MemoryIdempotencyRepository, "_schedule", schedule)


def record_shorter_than_delay() -> AbstractContextManager[Any]:
    """The record of a scheduled event is kept for the ttl alone, which may end before the event is due."""
    original = MemoryIdempotencyRepository._schedule

    def schedule(self: Any, reservation: Reserved, now: datetime, delay: timedelta, retention: timedelta) -> bool:
        answer = original(self, reservation, now, delay, retention)
        if answer:
            self._entries[reservation.key].expires_at = now + retention
        return answer

    return _patched(MemoryIdempotencyRepository, "_schedule", schedule)


def copies_of_others_handled() -> AbstractContextManager[Any]:
    """A copy for another consumer group is handled."""
    original = copy_of

    def of_any_group(record: Any, secrets: Any) -> RetryCopy:
        return replace(original(record, secrets), group=SCOPE)

    return _patched(retries, "copy_of", of_any_group)


def unsigned_copies_handled() -> AbstractContextManager[Any]:
    """A copy is handled although nobody has signed it."""
    original = copy_of
    return _patched(retries, "copy_of", lambda record, secrets: original(record, ()))


def copy_of_a_changed_event() -> AbstractContextManager[Any]:
    """The copy names the event as its handler has changed it."""
    original = Retries.publish

    async def publish(self: Retries, delivery: Delivery, execution: Any, *arguments: Any) -> bool:
        delivery.event_id = execution.event.event_id
        return await original(self, delivery, execution, *arguments)

    return _patched(Retries, "publish", publish)


BUGS: Final[dict[str, Bug]] = {
    bug.__name__: bug
    for bug in (
        no_token_check,
        unconditional_outcome,
        unconditional_delete,
        record_shorter_than_lease,
        clock_of_the_worker,
        reserve_not_repeatable,
        check_then_act,
        token_of_the_process,
        no_deadline_of_the_lease,
        no_check_before_a_start,
        every_crash_counts,
        no_renewal,
        key_made_again,
        completed_before_the_handler,
        acknowledge_in_progress,
        watermark_off_by_one,
        highest_finished,
        epoch_ignored,
        no_seek_after_a_failed_poll,
        position_of_the_client,
        position_of_a_closing_assignment,
        position_past_what_runs,
        abandoned_is_finished,
        acknowledged_in_an_outage,
        failed_without_a_dead_letter,
        dead_letter_after_the_offset,
        discarded_without_a_record,
        stopping_event_is_acknowledged,
        own_attempts_ignored,
        delay_ignored,
        fields_of_fingerprints_ignored,
        offset_first,
        never_reconciled,
        reconciled_without_events,
        offset_before_the_copy,
        attempt_of_the_copy_ignored,
        overtaken_in_place,
        scheduled_without_a_delay,
        record_shorter_than_delay,
        copies_of_others_handled,
        unsigned_copies_handled,
        copy_of_a_changed_event,
    )
}
