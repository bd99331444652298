"""The steps of the store on a record; each function is one atomic step.

The transitions are those of `integr8s_idem/stores/redis/*.lua` and `stores/memory.py`; a test compares every transition
of the explorer with the latter.
"""

from __future__ import annotations

from enum import Enum

from integr8s_idem.records import IdempotencyStatus, Previous
from tests.model.protocol import Protocol
from tests.model.state import Lease, Record, Request, Verb

PROCESSING, COMPLETED, FAILED = IdempotencyStatus.PROCESSING, IdempotencyStatus.COMPLETED, IdempotencyStatus.FAILED

NOBODYS_TOKEN = 0
"""Token of scheduled records."""


class Answer(str, Enum):
    """The answer to the caller."""

    RESERVED = "Reserved"
    IN_PROGRESS = "InProgress"
    SCHEDULED = "Scheduled"
    COMPLETED = "Completed"
    FAILED = "Failed"
    LAPSED = "lapsed"
    """Read but not taken over; only if reserving is not one step."""
    YES = "yes"
    NO = "no longer owned"


def execute(protocol: Protocol, record: Record | None, clock: int, request: Request) -> tuple[Record | None, Answer]:
    """Return the record after `request`, and the answer; `clock` is the highest fence of the key so far."""
    if request.verb is Verb.RESERVE:
        return reserve(protocol, record, clock, request)
    if request.verb is Verb.RENEW:
        return renew(record, request)
    if request.verb is Verb.COMPLETE:
        return settle(record, request, COMPLETED, checked=protocol.complete_checks_token)
    if request.verb is Verb.FAIL:
        return settle(record, request, FAILED, checked=protocol.fail_checks_token)
    if request.verb is Verb.SCHEDULE:
        return schedule(protocol, record, request)
    return release(protocol, record, request)


def reserve(protocol: Protocol, record: Record | None, clock: int, request: Request) -> tuple[Record, Answer]:
    if record is None:
        fence = clock + 1 if protocol.fence_outlives_its_record else 1
        return Record(PROCESSING, 1, fence, request.token, Lease.LIVE, Previous.NONE), Answer.RESERVED
    if record.status is not PROCESSING:
        return record, Answer.COMPLETED if record.status is COMPLETED else Answer.FAILED
    if record.token == request.token and record.lease is not Lease.RELEASED and protocol.reserve_knows_its_token:
        # The caller's own reservation: the answer to an earlier call was lost.
        return record._replace(lease=Lease.LIVE), Answer.RESERVED
    if record.lease is Lease.SCHEDULED and protocol.scheduled_waits_until_due:
        return record, Answer.SCHEDULED
    if record.lease is Lease.LIVE and not _seen_as_ended(protocol, request):
        return record, Answer.IN_PROGRESS
    if record.lease is Lease.ENDED and not protocol.lapsed_is_taken_over:
        return record, Answer.IN_PROGRESS
    if record.lease is Lease.ENDED and not protocol.reserve_is_one_step:
        return record, Answer.LAPSED
    return take(record, clock, request.token), Answer.RESERVED


def take(record: Record, clock: int, token: int) -> Record:
    """Return the record of the next attempt."""
    is_free = record.lease is Lease.RELEASED or (
        record.lease in (Lease.SCHEDULED, Lease.DUE) and record.token == NOBODYS_TOKEN
    )
    previous = Previous.RELEASED if is_free else Previous.LAPSED
    fence = max(record.fence, clock) + 1
    return Record(PROCESSING, record.attempt + 1, fence, token, Lease.LIVE, previous)


def renew(record: Record | None, request: Request) -> tuple[Record | None, Answer]:
    if record is None or not owned(record, request) or record.lease is Lease.RELEASED:
        return record, Answer.NO
    return record._replace(lease=Lease.LIVE), Answer.YES


def settle(
    record: Record | None, request: Request, status: IdempotencyStatus, *, checked: bool
) -> tuple[Record | None, Answer]:
    """Complete or fail."""
    if record is None:
        return None, Answer.NO
    if owned(record, request) or not checked:
        return Record(status, record.attempt, record.fence, 0, Lease.NONE, record.previous), Answer.YES
    if record.status is status and record.fence == request.fence:
        # Written already: the answer to that call was lost.
        return record, Answer.YES
    return record, Answer.NO


def release(protocol: Protocol, record: Record | None, request: Request) -> tuple[Record | None, Answer]:
    if record is None:
        return None, Answer.NO
    if owned(record, request) or not protocol.release_checks_token:
        return (record._replace(lease=Lease.RELEASED) if protocol.release_keeps_the_attempts else None), Answer.YES
    return record, Answer.NO


def schedule(protocol: Protocol, record: Record | None, request: Request) -> tuple[Record | None, Answer]:
    """Release with a delay."""
    if record is None:
        return None, Answer.NO
    if owned(record, request._replace(token=NOBODYS_TOKEN)):
        # Scheduled already: the answer to that call was lost.
        return record, Answer.YES
    if not owned(record, request):
        return record, Answer.NO
    token = NOBODYS_TOKEN if protocol.scheduled_belongs_to_nobody else record.token
    return record._replace(lease=Lease.SCHEDULED, token=token), Answer.YES


def owned(record: Record, request: Request) -> bool:
    return record.status is PROCESSING and record.token == request.token and record.fence == request.fence


def _seen_as_ended(protocol: Protocol, request: Request) -> bool:
    # The second worker's clock is ahead of all others.
    return not protocol.lease_by_the_stores_clock and request.worker == 1
