"""The rules that must never be broken, checked at each step that could break them.

The rules only see the change of the state; they know neither the protocol nor its switches.
"""

from __future__ import annotations

from collections.abc import Sequence

from integr8s_idem.records import IdempotencyStatus, Previous
from tests.model.state import Held, Key, Lease, Record, Rule, Run

PROCESSING = IdempotencyStatus.PROCESSING


def owns(held: Held | None, record: Record | None) -> bool:
    """Return whether the record still belongs to the reservation."""
    return (
        held is not None
        and record is not None
        and record.status is PROCESSING
        and record.token == held.token
        and record.fence == held.fence
    )


def judge_reserving(before: Record | None, after: Record, token: int, *, in_progress: bool) -> Rule | None:
    """A held, settled or scheduled key is not reserved, and a worker does not wait for its own reservation."""
    if in_progress:
        return Rule.WAITS_FOR_ITSELF if after.token == token else None
    if before is None or before == after:
        return None
    if before.status is not PROCESSING:
        return Rule.OUTCOME_OVERWRITTEN
    if before.lease is Lease.LIVE and before.token != after.token:
        return Rule.TWO_LEASES
    if before.lease is Lease.SCHEDULED:
        return Rule.EARLY
    if before.lease is Lease.DUE and after.previous is Previous.LAPSED:
        return Rule.COUNTED_AS_A_CRASH
    return None


def judge_owner(before: Record | None, after: Record | None, held: Held) -> Rule | None:
    """Only the owner changes the record of a reservation."""
    if before == after or owns(held, before):
        return None
    if before is not None and before.status is not PROCESSING:
        return Rule.OUTCOME_OVERWRITTEN
    return Rule.STALE_WRITE


def is_late(key: Key, held: Held) -> bool:
    """Return whether the lease of a reservation has ended by the clock of its holder.

    If the store lost the record, the lease is assumed to hold.
    """
    record = key.record
    if record is None or key.forgotten:
        return False
    return record.lease is Lease.ENDED if record.fence == held.fence else record.fence > held.fence


def judge_beginning(key: Key, held: Held, *, dead_lettered: bool) -> Rule | None:
    """A reservation allows one run while its lease holds, and a dead-lettered message allows none.

    Runs that follow the loss of a record are excepted.
    """
    if is_late(key, held):
        return Rule.LATE_START
    if key.begun and owns(held, key.record):
        return Rule.TWO_RUNS_OF_ONE_RESERVATION
    if dead_lettered and not key.forgotten:
        return Rule.RUN_AFTER_DEAD_LETTER
    return None


def judge_effect(before: Key, after: Key, run: Run) -> Rule | None:
    """At most one effect of a key comes from a run with attempt 1, and the sink never rejects the owner.

    Each lost record allows one more such effect.
    """
    if after.unaware > 1 + after.forgotten:
        return Rule.SILENT_REPEAT
    record = before.record
    if record is not None and record.fence == run.fence < before.sink:
        return Rule.OWNER_TURNED_AWAY
    return None


def judge_commit(before: int, after: int, settled: Sequence[bool]) -> Rule | None:
    """The offset only moves forwards, and only over settled messages (`settled`, by offset)."""
    if after < before:
        return Rule.REWOUND
    return None if all(settled[:after]) else Rule.LOST
