"""The protocol as switches, and variants that show what each switch prevents.

`LIBRARY` is the protocol of the library. Every variant changes a switch, and has the bug that its name describes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.model.state import Faults, Rule, Setup


@dataclass(frozen=True, slots=True)
class Protocol:
    """The design decisions of the protocol; the defaults are those of the library."""

    lapsed_is_taken_over: bool = True
    reserve_is_one_step: bool = True
    """The store reads and takes over a record atomically."""
    reserve_knows_its_token: bool = True
    """The store answers a repeated request with the same token with Reserved again."""
    lease_by_the_stores_clock: bool = True
    token_for_each_pass: bool = True
    """Every run uses a new token."""
    checks_the_lease_before_a_start: bool = True
    """A handler starts only if its lease holds by its own clock; otherwise it reserves again with the same token."""
    fence_outlives_its_record: bool = True
    record_outlives_its_lease: bool = True
    complete_checks_token: bool = True
    fail_checks_token: bool = True
    release_checks_token: bool = True
    release_keeps_the_attempts: bool = True
    scheduled_waits_until_due: bool = True
    """Nobody may reserve a key that was released with a delay before the delay has passed."""
    scheduled_belongs_to_nobody: bool = True
    """A release with a delay clears the token, so that the end of the delay is not the end of a lease."""
    waits_for_scheduled_work: bool = True
    """A delivery of scheduled work is not acknowledged: nobody runs the work."""
    waits_for_work_in_progress: bool = True
    """A duplicate of work in progress is retried later and not acknowledged."""
    missing_record_is_written_again: bool = True
    """If the record is missing at completion, the outcome is written with a new reservation."""
    failed_is_dead_lettered: bool = True
    fails_before_the_dead_letter: bool = True
    offset_waits_for_completion: bool = True
    discard_waits_for_completion: bool = True
    """An event whose error a rule discards is settled after its record is completed."""
    stop_keeps_the_event: bool = True
    """An event that stops its service is not settled."""
    offset_waits_for_the_dead_letter: bool = True
    offset_stops_at_the_first_unfinished: bool = True
    only_the_present_epoch_commits: bool = True


LIBRARY = Protocol()


@dataclass(frozen=True, slots=True)
class Variant:
    """A protocol with a bug, and a configuration that reveals it."""

    bug: str
    protocol: Protocol
    setup: Setup
    breaks: tuple[Rule, ...]
    """The rule that the shortest counterexample breaks, and others that longer ones break."""


def _two_workers(keys: tuple[int, ...] = (0,), attempts: int = 2, **faults: int) -> Setup:
    return Setup(2, (keys,), Faults(**faults), attempts)


VARIANTS: dict[str, Variant] = {
    "check-then-act": Variant(
        "the seeds: a lapsed record is read, and then taken over without checking it again",
        Protocol(reserve_is_one_step=False),
        Setup(3, ((0,),), Faults(crashes=1, moves=1)),
        (Rule.TWO_LEASES, Rule.OUTCOME_OVERWRITTEN),
    ),
    "no-takeover": Variant(
        "a reservation never expires: if its worker dies, the work is never done",
        Protocol(lapsed_is_taken_over=False),
        _two_workers(crashes=1),
        (Rule.STUCK,),
    ),
    "acknowledge-in-progress": Variant(
        "the seeds: a duplicate of work in progress is acknowledged; then the worker dies",
        Protocol(waits_for_work_in_progress=False),
        _two_workers(crashes=1),
        (Rule.LOST,),
    ),
    "seeds": Variant(
        "the seeds as a whole: both bugs above, writes without a token, no dead letters",
        Protocol(
            reserve_is_one_step=False,
            reserve_knows_its_token=False,
            complete_checks_token=False,
            fail_checks_token=False,
            release_checks_token=False,
            waits_for_work_in_progress=False,
            failed_is_dead_lettered=False,
        ),
        Setup(2, ((0,),), Faults(crashes=1, moves=1, stalls=1, unanswered=1), 1),
        (Rule.LOST, Rule.TWO_LEASES, Rule.STALE_WRITE, Rule.OUTCOME_OVERWRITTEN, Rule.WAITS_FOR_ITSELF),
    ),
    "unfenced-completion": Variant(
        "powertools: a completion is written without checking the owner of the record",
        Protocol(complete_checks_token=False),
        _two_workers(moves=1, stalls=1),
        (Rule.STALE_WRITE,),
    ),
    "unfenced-failure": Variant(
        "powertools: a late failure marks the record of the new owner",
        Protocol(fail_checks_token=False),
        _two_workers(moves=1, stalls=1, failures=1),
        (Rule.STALE_WRITE, Rule.OUTCOME_OVERWRITTEN),
    ),
    "unfenced-release": Variant(
        "powertools: a late failure releases the key of the new owner",
        Protocol(release_checks_token=False),
        _two_workers(moves=1, stalls=1, failures=1),
        (Rule.STALE_WRITE, Rule.OUTCOME_OVERWRITTEN),
    ),
    "release-forgets": Variant(
        "a failed run deletes its record, and the next one is attempt 1 again",
        Protocol(release_keeps_the_attempts=False),
        _two_workers(failures=1),
        (Rule.SILENT_REPEAT,),
    ),
    "reserve-without-token": Variant(
        "only SET NX: after a lost answer, the retry finds its own reservation and takes it for another one",
        Protocol(reserve_knows_its_token=False),
        _two_workers(unanswered=1),
        (Rule.WAITS_FOR_ITSELF,),
    ),
    "token-kept-for-the-next-run": Variant(
        "the token of a reservation is used again to reserve for the next run",
        Protocol(token_for_each_pass=False),
        _two_workers(unanswered=1, lost_records=1),
        (Rule.TWO_RUNS_OF_ONE_RESERVATION,),
    ),
    "start-without-a-look": Variant(
        "a batch is reserved, and its handlers start one after the other without checking their leases",
        Protocol(checks_the_lease_before_a_start=False),
        _two_workers(moves=1, stalls=1),
        (Rule.LATE_START,),
    ),
    "workers-clock": Variant(
        "a worker whose clock is ahead decides whether the lease of another one has ended",
        Protocol(lease_by_the_stores_clock=False),
        _two_workers(moves=1),
        (Rule.TWO_LEASES,),
    ),
    "record-dies-with-its-lease": Variant(
        "the record is a lock that expires, and with it the number of attempts",
        Protocol(record_outlives_its_lease=False),
        _two_workers(crashes=1),
        (Rule.SILENT_REPEAT,),
    ),
    "fence-restarts": Variant(
        "the fence is a counter in the record: after an eviction it is lower than fences the sink has seen",
        Protocol(fence_outlives_its_record=False),
        _two_workers(crashes=2, lost_records=1),
        (Rule.OWNER_TURNED_AWAY,),
    ),
    "missing-record-is-success": Variant(
        "the record is missing at completion, and the offset moves without a recorded outcome",
        Protocol(missing_record_is_written_again=False),
        _two_workers(lost_records=1),
        (Rule.LOST,),
    ),
    "failed-and-acknowledged": Variant(
        "the seeds: failed work is acknowledged without a dead letter, and the message is lost",
        Protocol(failed_is_dead_lettered=False),
        _two_workers(attempts=1, failures=1),
        (Rule.LOST,),
    ),
    "dead-letter-first": Variant(
        "the dead letter is sent before the failure is recorded, and the message is handled again after a crash",
        Protocol(fails_before_the_dead_letter=False),
        _two_workers(crashes=1, failures=1),
        (Rule.RUN_AFTER_DEAD_LETTER,),
    ),
    "scheduled-runs-at-once": Variant(
        "a release with a delay only releases, and a duplicate runs the work before it is due",
        Protocol(scheduled_waits_until_due=False),
        _two_workers(failures=1),
        (Rule.EARLY,),
    ),
    "scheduled-keeps-its-lease": Variant(
        "scheduled work keeps the token of its run, and the end of the delay counts as a crash",
        Protocol(scheduled_belongs_to_nobody=False),
        _two_workers(failures=1),
        (Rule.COUNTED_AS_A_CRASH,),
    ),
    "acknowledge-scheduled": Variant(
        "a duplicate of scheduled work is acknowledged like work in progress, and nobody runs it",
        Protocol(waits_for_scheduled_work=False),
        _two_workers(failures=1),
        (Rule.LOST,),
    ),
    "offset-before-completion": Variant(
        "the offset moves when the handler starts",
        Protocol(offset_waits_for_completion=False),
        _two_workers(),
        (Rule.LOST,),
    ),
    "discard-before-completion": Variant(
        "an event whose error is discarded is settled without a record",
        Protocol(discard_waits_for_completion=False),
        _two_workers(failures=1),
        (Rule.LOST,),
    ),
    "stop-settles": Variant(
        "the event that stops its service is settled",
        Protocol(stop_keeps_the_event=False),
        _two_workers(failures=1),
        (Rule.LOST,),
    ),
    "offset-before-dead-letter": Variant(
        "the offset moves before the dead letter is confirmed",
        Protocol(offset_waits_for_the_dead_letter=False),
        _two_workers(attempts=1, failures=1),
        (Rule.LOST,),
    ),
    "highest-offset": Variant(
        "the highest finished offset is committed, although a lower one is not finished",
        Protocol(offset_stops_at_the_first_unfinished=False),
        _two_workers(keys=(0, 1)),
        (Rule.LOST,),
    ),
    "any-epoch-commits": Variant(
        "a run that ends after its partition was lost still commits its offset",
        Protocol(only_the_present_epoch_commits=False),
        _two_workers(keys=(0, 1), moves=1),
        (Rule.REWOUND,),
    ),
}
