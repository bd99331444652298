"""What must never happen, judged at the step that could make it happen.

The rules look at what changed, not at how: they know neither the protocol nor its switches.
"""

from __future__ import annotations

from collections.abc import Sequence

from integr8s_idem.records import IdempotencyStatus
from tests.model.state import Held, Key, Lease, Record, Rule, Run

PROCESSING = IdempotencyStatus.PROCESSING


def owns(held: Held | None, record: Record | None) -> bool:
    """Whether the record still is that of the reservation."""
    return (
        held is not None
        and record is not None
        and record.status is PROCESSING
        and record.token == held.token
        and record.fence == held.fence
    )


def judge_reserving(before: Record | None, after: Record, token: int, *, in_progress: bool) -> Rule | None:
    """Nobody gets what somebody else holds or has settled; nobody is told to wait for himself."""
    if in_progress:
        return Rule.WAITS_FOR_ITSELF if after.token == token else None
    if before is None or before == after:
        return None
    if before.status is not PROCESSING:
        return Rule.OUTCOME_OVERWRITTEN
    if before.lease is Lease.LIVE and before.token != after.token:
        return Rule.TWO_LEASES
    return None


def judge_owner(before: Record | None, after: Record | None, held: Held) -> Rule | None:
    """Only the owner of a reservation changes it."""
    if before == after or owns(held, before):
        return None
    if before is not None and before.status is not PROCESSING:
        return Rule.OUTCOME_OVERWRITTEN
    return Rule.STALE_WRITE


def is_late(key: Key, held: Held) -> bool:
    """Whether the lease of a reservation has ended, which its holder knows by its own clock.

    Of a record that the store has lost nobody knows more than that the lease held.
    """
    record = key.record
    if record is None or key.forgotten:
        return False
    return record.lease is Lease.ENDED if record.fence == held.fence else record.fence > held.fence


def judge_beginning(key: Key, held: Held, *, dead_lettered: bool) -> Rule | None:
    """A reservation is good for one run while its lease holds, and a dead letter for none; a store that forgot could
    not know."""
    if is_late(key, held):
        return Rule.LATE_START
    if key.begun and owns(held, key.record):
        return Rule.TWO_RUNS_OF_ONE_RESERVATION
    if dead_lettered and not key.forgotten:
        return Rule.RUN_AFTER_DEAD_LETTER
    return None


def judge_effect(before: Key, after: Key, run: Run) -> Rule | None:
    """Of all effects of a key one may come from a run that was told to be the first: no other is silent.
    Each record that the store has lost allows one more.  The sink never refuses the owner."""
    if after.unaware > 1 + after.forgotten:
        return Rule.SILENT_REPEAT
    record = before.record
    if record is not None and record.fence == run.fence < before.sink:
        return Rule.OWNER_TURNED_AWAY
    return None


def judge_commit(before: int, after: int, settled: Sequence[bool]) -> Rule | None:
    """The offset moves: forwards, and only over what is settled for good.  `settled`: by offset."""
    if after < before:
        return Rule.REWOUND
    return None if all(settled[:after]) else Rule.LOST
