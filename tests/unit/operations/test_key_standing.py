"""How a record stands, whether it is wanted, and what would happen next."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, OnKeyReused
from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.operations.keys.explanation import newest_after
from integr8s_idem.operations.keys.key_parser import named
from integr8s_idem.operations.keys.next_delivery import Outlook, span
from integr8s_idem.operations.keys.record_filter import Wanted, checked_states, length_of
from integr8s_idem.operations.keys.record_state import Lease, Standing
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus, StoredResult

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
LEASE = timedelta(seconds=300)
SPACE = KeySpace("idempotency", "billing")
KEY = SPACE.full(Key.of_event("charge", "order_placed", "id", "1"))
CONFIG = IdempotencyConfig(max_attempts=3, processing_timeout_seconds=300)


def record(**told: Any) -> IdempotencyRecord:
    begun = NOW - timedelta(minutes=10)
    fields: dict[str, Any] = {
        "key": KEY,
        "status": IdempotencyStatus.PROCESSING,
        "attempt": 1,
        "fence": int(begun.timestamp() * 1_000_000),
        "lease_until": NOW + timedelta(seconds=100),
        "expires_at": NOW + timedelta(hours=1),
        "owner": "billing@a",
        "seen_at": NOW,
    }
    return IdempotencyRecord(**{**fields, **told})


HELD = record()
LAPSED = record(lease_until=NOW - timedelta(seconds=5))
RELEASED = record(lease_until=None)
SETTLED = {"lease_until": None, "owner": "", "settled_at": NOW - timedelta(minutes=2)}
COMPLETED = record(status=IdempotencyStatus.COMPLETED, result=StoredResult(b"1"), **SETTLED)
FAILED = record(status=IdempotencyStatus.FAILED, error="no such account", **SETTLED)
CORRUPT = Corrupt(key=KEY, reason="it is damaged")


@pytest.mark.parametrize(
    ("found", "lease"),
    [(HELD, Lease.HELD), (LAPSED, Lease.LAPSED), (RELEASED, Lease.RELEASED), (COMPLETED, None), (FAILED, None)],
)
def test_what_has_become_of_a_lease(found: IdempotencyRecord, lease: Lease | None) -> None:
    assert Standing(found).lease is lease


def test_a_lease_ends_by_the_clock_that_the_record_was_read_by() -> None:
    assert Standing(replace(HELD, seen_at=NOW + timedelta(seconds=100))).lease is Lease.LAPSED
    assert Standing(HELD).lease_left == timedelta(seconds=100)


def test_the_age_of_what_is_settled_is_counted_from_then() -> None:
    assert Standing(COMPLETED).age == timedelta(minutes=2)
    assert Standing(HELD).age == timedelta(minutes=10)


def test_a_fence_that_is_no_time_breaks_nothing() -> None:
    assert Standing(record(fence=2**62)).reserved_at.year == 9999


@pytest.mark.parametrize(("left", "alive"), [(299, True), (151, True), (149, False), (1, False)])
def test_an_owner_seems_alive_as_long_as_it_has_renewed_in_time(left: int, alive: bool) -> None:
    assert Standing(record(lease_until=NOW + timedelta(seconds=left))).seems_alive(LEASE) is alive


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (Wanted(), (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)),
        (Wanted(states=("processing",)), (HELD, LAPSED, RELEASED)),
        (Wanted(states=("failed", "completed")), (COMPLETED, FAILED)),
        (Wanted(states=("corrupt",)), (CORRUPT,)),
        (Wanted(states=("corrupt",), older_than=timedelta(days=1)), (CORRUPT,)),
        (Wanted(lease_ended=True), (LAPSED, RELEASED)),
        (Wanted(owners=("billing@a",)), (HELD, LAPSED, RELEASED)),
        (Wanted(owners=("billing@b",)), ()),
        (Wanted(services=("billing", "audit")), (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)),
        (Wanted(services=("audit",)), ()),
        (Wanted(event_types=("order_placed",)), (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)),
        (Wanted(event_types=("order_paid",)), ()),
        (Wanted(older_than=timedelta(minutes=5)), (HELD, LAPSED, RELEASED)),
        (Wanted(newer_than=timedelta(minutes=5)), (COMPLETED, FAILED)),
        (Wanted(newer_than=timedelta(minutes=5), states=("failed",)), (FAILED,)),
    ],
)
def test_what_a_filter_takes(wanted: Wanted, taken: tuple[object, ...]) -> None:
    every = (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)

    assert tuple(one for one in every if wanted.takes(one, named(one.key, "idempotency"))) == taken


def test_a_filter_looks_no_further_than_it_must() -> None:
    assert Wanted(services=("billing",)).prefix("idempotency") == "idempotency:billing:"
    assert Wanted(services=("billing", "audit")).prefix("idempotency") == "idempotency:"
    assert Wanted(event_types=("order_placed",)).holding == [":order_placed:"]


def test_a_service_with_a_long_name_is_found_by_its_hash() -> None:
    key = KeySpace("idempotency", "x" * 200).full(Key.of("1"))

    assert Wanted(services=("x" * 200,)).takes(replace(HELD, key=key), named(key, "idempotency"))


@pytest.mark.parametrize(
    ("text", "length"),
    [("90s", timedelta(seconds=90)), ("1.5h", timedelta(minutes=90)), ("1d12h", timedelta(hours=36))],
)
def test_a_length_of_time(text: str, length: timedelta) -> None:
    assert length_of(text) == length


@pytest.mark.parametrize("text", ["", "2", "2 h", "h", "2y", "-2h", "2h!", "999999999w"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(ApplicationError):
        length_of(text)


def test_a_status_that_there_is_not_is_refused() -> None:
    with pytest.raises(ApplicationError, match="there are processing, completed, failed, corrupt"):
        checked_states(["done"])


@pytest.mark.parametrize(
    ("found", "config", "said"),
    [
        (None, {}, "handled, as attempt 1 of at most 3"),
        (None, {"on_failure": OnFailure.BLOCK}, "gives it up at once"),
        (CORRUPT, {}, "dead-letters it (corrupt_record)"),
        (COMPLETED, {}, "answered with the stored result, for another 1 h"),
        (replace(COMPLETED, result=None), {}, "its result was not kept"),
        (replace(COMPLETED, result=None, result_dropped=True), {}, "ResultDroppedError"),
        (FAILED, {}, "dead-letters it (previously_failed), for another 1 h; a replay of its dead letter is handled"),
        (HELD, {}, "would wait for the outcome of that run; a worker keeps its offset uncommitted"),
        (HELD, {}, "attempt 2 takes over when the lease ends, in 1 min 40 s"),
        (HELD, {"on_in_progress": OnInProgress.RAISE}, "InProgressError, and a worker tries it again"),
        (HELD, {"on_in_progress": OnInProgress.SKIP}, "acknowledge it without handling it"),
        (LAPSED, {}, "taken over and handled, as attempt 2"),
        (replace(LAPSED, attempt=2), {}, "as attempt 3; if that fails, it is given up (max_attempts = 3)"),
        (replace(LAPSED, attempt=3), {}, "not be handled: CrashedTooOftenError"),
        (RELEASED, {}, "handled again, as attempt 2"),
        (replace(RELEASED, attempt=3), {}, "handled again, as attempt 4; if that fails, it is given up"),
    ],
)
def test_what_would_happen_to_the_next_delivery(
    found: IdempotencyRecord | Corrupt | None, config: dict[str, Any], said: str
) -> None:
    assert said in Outlook(CONFIG.model_copy(update=config)).of(found)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (replace(LAPSED, attempt=2, lapsed=1), "taken over and handled, as attempt 3, alone in its process"),
        (replace(LAPSED, attempt=9, lapsed=8), "as attempt 10, alone in its process"),
        (replace(LAPSED, attempt=5, lapsed=4, lapsed_alone=2, alone=True), "not be handled: CrashedTooOftenError"),
        (replace(LAPSED, attempt=5, lapsed=4, lapsed_alone=2), "as attempt 6, alone in its process; if that fails"),
        (replace(RELEASED, attempt=4, lapsed=2), "handled again, as attempt 5, alone in its process; if that fails"),
        (replace(RELEASED, attempt=2, lapsed=1), "handled again, as attempt 3"),
    ],
)
def test_what_would_happen_where_a_worker_runs_suspects_alone(found: IdempotencyRecord, said: str) -> None:
    told = Outlook(CONFIG, isolates=True).of(found)

    assert said in told
    assert ("alone in its process" in told) == ("alone in its process" in said)


@pytest.mark.parametrize(
    ("replay", "said"),
    [
        (COMPLETED, "generation 2, is completed, and another replay of its dead letter would be left out"),
        (FAILED, "generation 2, was given up as well: replay the dead letter of that one"),
        (HELD, "generation 2, is not settled yet"),
        (CORRUPT, "generation 2, has a record that cannot be read"),
    ],
)
def test_what_was_given_up_and_replayed_is_told_by_its_replay(replay: IdempotencyRecord | Corrupt, said: str) -> None:
    generations = {1: FAILED, 2: replay}

    assert said in Outlook(CONFIG).of(FAILED, replayed=newest_after(0, generations))
    assert newest_after(2, generations) is None


def test_a_caller_is_told_of_no_worker() -> None:
    outlook = Outlook(CONFIG, by_worker=False)

    assert not any("worker" in outlook.of(found) for found in (FAILED, HELD, CORRUPT))
    assert not any("letter" in outlook.of(found) for found in (FAILED, HELD, CORRUPT))
    assert "at most 30 s" in outlook.of(HELD)
    assert "without its record it is done again" in outlook.of(FAILED)


def test_another_payload_under_the_key_is_told_before_all_else() -> None:
    found = replace(COMPLETED, fingerprint=b"a" * 16)

    assert "key_reused" in Outlook(CONFIG).of(found, b"b" * 16)
    assert "unguarded" in Outlook(CONFIG.model_copy(update={"on_key_reused": OnKeyReused.RUN})).of(found, b"b" * 16)
    assert "stored result" in Outlook(CONFIG).of(found, b"a" * 16)
    assert "stored result" in Outlook(CONFIG).of(COMPLETED, b"b" * 16)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.25, "250 ms"), (5, "5.0 s"), (59.6, "1 min"), (90, "1 min 30 s"), (86_400, "1 d"), (90_061, "1 d 1 h")],
)
def test_a_span_has_two_units_at_most(seconds: float, told: str) -> None:
    assert span(timedelta(seconds=seconds)) == told
