"""The protocol as switches, and what each of them is there for.

`OURS` is what the library does.  Every variant turns some switch, and has the bug that its name says.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.model.state import Faults, Rule, Setup


@dataclass(frozen=True, slots=True)
class Protocol:
    """Each switch is a decision; the default is ours."""

    lapsed_is_taken_over: bool = True
    reserve_is_one_step: bool = True
    """A record is read and taken over in the store, at once."""
    reserve_knows_its_token: bool = True
    """Asked again by the same token, the store says Reserved again."""
    lease_by_the_stores_clock: bool = True
    token_for_each_pass: bool = True
    """No token is used for a second run, whatever the first one did with it."""
    checks_the_lease_before_a_start: bool = True
    """A handler begins on a lease that holds by its own clock; otherwise the key is asked for by the same token."""
    fence_outlives_its_record: bool = True
    record_outlives_its_lease: bool = True
    complete_checks_token: bool = True
    fail_checks_token: bool = True
    release_checks_token: bool = True
    release_keeps_the_attempts: bool = True
    waits_for_its_twin: bool = True
    """In progress elsewhere: ask again later, and acknowledge nothing meanwhile."""
    missing_record_is_written_anew: bool = True
    """At completion; otherwise it is taken for success."""
    failed_is_dead_lettered: bool = True
    fails_before_the_dead_letter: bool = True
    offset_waits_for_completion: bool = True
    offset_waits_for_the_dead_letter: bool = True
    offset_stops_at_the_first_unfinished: bool = True
    only_the_present_epoch_commits: bool = True


OURS = Protocol()


@dataclass(frozen=True, slots=True)
class Variant:
    """A protocol with a bug, and a world in which that shows."""

    bug: str
    protocol: Protocol
    setup: Setup
    breaks: tuple[Rule, ...]
    """The rule that the shortest counterexample breaks, and others that longer ones break."""


def _two_workers(keys: tuple[int, ...] = (0,), attempts: int = 2, **faults: int) -> Setup:
    return Setup(2, (keys,), Faults(**faults), attempts)


VARIANTS: dict[str, Variant] = {
    "check-then-act": Variant(
        "the seeds: a lapsed record is read, and then taken over without looking again",
        Protocol(reserve_is_one_step=False),
        Setup(3, ((0,),), Faults(crashes=1, moves=1)),
        (Rule.TWO_LEASES, Rule.OUTCOME_OVERWRITTEN),
    ),
    "no-takeover": Variant(
        "reserved for ever: when its worker dies, nobody ever does the work",
        Protocol(lapsed_is_taken_over=False),
        _two_workers(crashes=1),
        (Rule.STUCK,),
    ),
    "acknowledge-in-progress": Variant(
        "the seeds: a duplicate of work in progress is acknowledged; then the worker dies",
        Protocol(waits_for_its_twin=False),
        _two_workers(crashes=1),
        (Rule.LOST,),
    ),
    "seeds": Variant(
        "the seeds as a whole: both of the above, writes without a token, FAILED and acknowledged at once",
        Protocol(
            reserve_is_one_step=False,
            reserve_knows_its_token=False,
            complete_checks_token=False,
            fail_checks_token=False,
            release_checks_token=False,
            waits_for_its_twin=False,
            failed_is_dead_lettered=False,
        ),
        Setup(2, ((0,),), Faults(crashes=1, moves=1, stalls=1, unanswered=1), 1),
        (Rule.LOST, Rule.TWO_LEASES, Rule.STALE_WRITE, Rule.OUTCOME_OVERWRITTEN, Rule.WAITS_FOR_ITSELF),
    ),
    "unfenced-completion": Variant(
        "powertools: a completion is written whoever owns the record",
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
        "powertools: a late failure gives the key of the new owner back",
        Protocol(release_checks_token=False),
        _two_workers(moves=1, stalls=1, failures=1),
        (Rule.STALE_WRITE, Rule.OUTCOME_OVERWRITTEN),
    ),
    "release-forgets": Variant(
        "a failed run deletes its record, and the next one takes itself for the first",
        Protocol(release_keeps_the_attempts=False),
        _two_workers(failures=1),
        (Rule.SILENT_REPEAT,),
    ),
    "reserve-without-token": Variant(
        "SET NX alone: asked again because the answer was lost, the store names us as somebody else",
        Protocol(reserve_knows_its_token=False),
        _two_workers(unanswered=1),
        (Rule.WAITS_FOR_ITSELF,),
    ),
    "token-kept-for-the-next-run": Variant(
        "a token that a reservation was made with is used to ask for the next run",
        Protocol(token_for_each_pass=False),
        _two_workers(unanswered=1, lost_records=1),
        (Rule.TWO_RUNS_OF_ONE_RESERVATION,),
    ),
    "start-without-a-look": Variant(
        "a batch is reserved, and its handlers begin one after the other, however long that takes",
        Protocol(checks_the_lease_before_a_start=False),
        _two_workers(moves=1, stalls=1),
        (Rule.LATE_START,),
    ),
    "workers-clock": Variant(
        "a worker whose clock is ahead judges the lease of another",
        Protocol(lease_by_the_stores_clock=False),
        _two_workers(moves=1),
        (Rule.TWO_LEASES,),
    ),
    "record-dies-with-its-lease": Variant(
        "the record is a lock that expires: nobody knows that there was a run",
        Protocol(record_outlives_its_lease=False),
        _two_workers(crashes=1),
        (Rule.SILENT_REPEAT,),
    ),
    "fence-restarts": Variant(
        "the fence is counted in the record: once that is evicted, the sink has seen higher ones",
        Protocol(fence_outlives_its_record=False),
        _two_workers(crashes=2, lost_records=1),
        (Rule.OWNER_TURNED_AWAY,),
    ),
    "missing-record-is-success": Variant(
        "the record is gone at completion, and the offset moves with nothing written down",
        Protocol(missing_record_is_written_anew=False),
        _two_workers(lost_records=1),
        (Rule.LOST,),
    ),
    "failed-and-acknowledged": Variant(
        "the seeds: FAILED is terminal, and the message is gone",
        Protocol(failed_is_dead_lettered=False),
        _two_workers(attempts=1, failures=1),
        (Rule.LOST,),
    ),
    "dead-letter-first": Variant(
        "the message is dead-lettered before the record is FAILED, and handled again after a crash",
        Protocol(fails_before_the_dead_letter=False),
        _two_workers(crashes=1, failures=1),
        (Rule.RUN_AFTER_DEAD_LETTER,),
    ),
    "offset-before-completion": Variant(
        "the offset moves when the message is handed to the handler",
        Protocol(offset_waits_for_completion=False),
        _two_workers(),
        (Rule.LOST,),
    ),
    "offset-before-dead-letter": Variant(
        "the offset moves while the dead-letter topic has not confirmed",
        Protocol(offset_waits_for_the_dead_letter=False),
        _two_workers(attempts=1, failures=1),
        (Rule.LOST,),
    ),
    "highest-offset": Variant(
        "the highest finished offset is committed, over one that is not finished",
        Protocol(offset_stops_at_the_first_unfinished=False),
        _two_workers(keys=(0, 1)),
        (Rule.LOST,),
    ),
    "any-epoch-commits": Variant(
        "a run that ends after its partition was lost still commits",
        Protocol(only_the_present_epoch_commits=False),
        _two_workers(keys=(0, 1), moves=1),
        (Rule.REWOUND,),
    ),
}
