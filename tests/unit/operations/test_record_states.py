"""States of records, filters, durations and predictions of the next delivery."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from integr8s_idem.cli.keys_format import explanation_json, list_row, record_json, rows
from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, OnKeyReused
from integr8s_idem.engine.results import discarded_result, observed_result
from integr8s_idem.errors import ApplicationError
from integr8s_idem.failures import dead_letter, discard, retry, retry_later, stop
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.operations.keys.explanation import Explanation, RecordExplanation, newest_after
from integr8s_idem.operations.keys.key_parser import parse_key
from integr8s_idem.operations.keys.next_delivery import NextDelivery, format_duration
from integr8s_idem.operations.keys.record_filter import RecordFilter, check_statuses, parse_duration
from integr8s_idem.operations.keys.record_state import Lease, RecordState
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus, StoredResult

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
LEASE = timedelta(seconds=300)
SPACE = KeySpace("idempotency", "billing")
KEY = SPACE.full(Key.of_event("charge", "order_placed", "id", "1"))
CONFIG = IdempotencyConfig(max_attempts=3, processing_timeout_seconds=300)


def record(**text: Any) -> IdempotencyRecord:
    started = NOW - timedelta(minutes=10)
    fields: dict[str, Any] = {
        "key": KEY,
        "status": IdempotencyStatus.PROCESSING,
        "attempt": 1,
        "fence": int(started.timestamp() * 1_000_000),
        "lease_until": NOW + timedelta(seconds=100),
        "expires_at": NOW + timedelta(hours=1),
        "owner": "billing@a",
        "seen_at": NOW,
    }
    return IdempotencyRecord(**{**fields, **text})


HELD = record()
LAPSED = record(lease_until=NOW - timedelta(seconds=5))
RELEASED = record(lease_until=None)
SETTLED = {"lease_until": None, "owner": "", "settled_at": NOW - timedelta(minutes=2)}
COMPLETED = record(status=IdempotencyStatus.COMPLETED, result=StoredResult(b"1"), **SETTLED)
DISCARDED = replace(COMPLETED, result=discarded_result("KeyError: withdrawn"))
FAILED = record(status=IdempotencyStatus.FAILED, error="no such account", **SETTLED)
CORRUPT = Corrupt(key=KEY, reason="it is damaged")


@pytest.mark.parametrize(
    ("found", "lease"),
    [(HELD, Lease.HELD), (LAPSED, Lease.LAPSED), (RELEASED, Lease.RELEASED), (COMPLETED, None), (FAILED, None)],
)
def test_the_state_of_a_lease(found: IdempotencyRecord, lease: Lease | None) -> None:
    assert RecordState(found).lease is lease


def test_a_lease_ends_by_the_stores_clock() -> None:
    assert RecordState(replace(HELD, seen_at=NOW + timedelta(seconds=100))).lease is Lease.LAPSED
    assert RecordState(HELD).lease_left == timedelta(seconds=100)


def test_the_age_of_a_settled_record_starts_at_its_outcome() -> None:
    assert RecordState(COMPLETED).age == timedelta(minutes=2)
    assert RecordState(HELD).age == timedelta(minutes=10)


def test_a_fence_out_of_range_is_tolerated() -> None:
    assert RecordState(record(fence=2**62)).reserved_at.year == 9999


@pytest.mark.parametrize(("left", "alive"), [(299, True), (151, True), (149, False), (1, False)])
def test_an_owner_is_considered_alive_after_a_recent_renewal(left: int, alive: bool) -> None:
    assert RecordState(record(lease_until=NOW + timedelta(seconds=left))).is_owner_alive(LEASE) is alive


@pytest.mark.parametrize(
    ("record_filter", "matches"),
    [
        (RecordFilter(), (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)),
        (RecordFilter(states=("processing",)), (HELD, LAPSED, RELEASED)),
        (RecordFilter(states=("failed", "completed")), (COMPLETED, FAILED)),
        (RecordFilter(states=("corrupt",)), (CORRUPT,)),
        (RecordFilter(states=("corrupt",), older_than=timedelta(days=1)), (CORRUPT,)),
        (RecordFilter(lease_ended=True), (LAPSED, RELEASED)),
        (RecordFilter(owners=("billing@a",)), (HELD, LAPSED, RELEASED)),
        (RecordFilter(owners=("billing@b",)), ()),
        (RecordFilter(services=("billing", "audit")), (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)),
        (RecordFilter(services=("audit",)), ()),
        (RecordFilter(event_types=("order_placed",)), (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)),
        (RecordFilter(event_types=("order_paid",)), ()),
        (RecordFilter(older_than=timedelta(minutes=5)), (HELD, LAPSED, RELEASED)),
        (RecordFilter(newer_than=timedelta(minutes=5)), (COMPLETED, FAILED)),
        (RecordFilter(newer_than=timedelta(minutes=5), states=("failed",)), (FAILED,)),
    ],
)
def test_records_that_a_filter_matches(record_filter: RecordFilter, matches: tuple[object, ...]) -> None:
    every = (HELD, LAPSED, RELEASED, COMPLETED, FAILED, CORRUPT)

    assert tuple(one for one in every if record_filter.matches(one, parse_key(one.key, "idempotency"))) == matches


def test_a_filter_restricts_the_scan() -> None:
    assert RecordFilter(services=("billing",)).prefix("idempotency") == "idempotency:billing:"
    assert RecordFilter(services=("billing", "audit")).prefix("idempotency") == "idempotency:"
    assert RecordFilter(event_types=("order_placed",)).key_parts == [":order_placed:"]


def test_a_service_with_a_long_name_is_found_by_its_hash() -> None:
    key = KeySpace("idempotency", "x" * 200).full(Key.of("1"))

    assert RecordFilter(services=("x" * 200,)).matches(replace(HELD, key=key), parse_key(key, "idempotency"))


@pytest.mark.parametrize(
    ("text", "duration"),
    [("90s", timedelta(seconds=90)), ("1.5h", timedelta(minutes=90)), ("1d12h", timedelta(hours=36))],
)
def test_durations(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "2", "2 h", "h", "2y", "-2h", "2h!", "999999999w"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(ApplicationError):
        parse_duration(text)


def test_a_discarded_record_is_shown_as_such() -> None:
    parsed = parse_key(KEY, "idempotency")
    explained = RecordExplanation(parsed, DISCARDED, CONFIG, "would not be handled")

    shown = dict(rows(explained))

    assert shown["handled"].startswith("discarded by billing (handler charge)")
    assert shown["error"] == "KeyError: withdrawn"
    assert shown["stored"] == "no result"
    assert list_row(DISCARDED, parsed)[3] == "discarded: KeyError: withdrawn"
    assert record_json(DISCARDED, parsed)["discarded"] is True
    assert record_json(COMPLETED, parsed)["discarded"] is False


@pytest.mark.parametrize(
    ("next_delivery", "other_payloads"),
    [
        (NextDelivery(CONFIG), "other payloads with this key are refused"),
        (NextDelivery(CONFIG, observes=True), "other payloads with this key are handled as well, and counted"),
        (
            NextDelivery(CONFIG.model_copy(update={"on_key_reused": OnKeyReused.RUN})),
            "other payloads with this key are handled unguarded",
        ),
    ],
)
def test_the_fingerprint_says_what_happens_to_other_payloads(next_delivery: NextDelivery, other_payloads: str) -> None:
    record = replace(COMPLETED, fingerprint=b"\x01\x02")
    explained = RecordExplanation(
        parse_key(KEY, "idempotency"), record, CONFIG, "", other_payloads=next_delivery.other_payloads()
    )

    assert dict(rows(explained))["fingerprint"] == f"0102; {other_payloads}"


def test_the_record_of_an_observed_event_does_not_say_that_it_was_not_discarded() -> None:
    record = replace(COMPLETED, result=observed_result("orders:0:7"))
    explained = RecordExplanation(parse_key(KEY, "idempotency"), record, CONFIG, "")

    assert dict(rows(explained))["handled"] == (
        "yes, or discarded by a rule, by billing (handler charge): records of observe mode do not say which"
    )


def test_an_unknown_status_is_refused() -> None:
    with pytest.raises(ApplicationError, match='invalid status "done"; choose from processing, completed'):
        check_statuses(["done"])


@pytest.mark.parametrize(
    ("found", "config", "expected"),
    [
        (None, {}, "handled, as attempt 1 of at most 3"),
        (None, {"on_failure": OnFailure.BLOCK}, "a failure would be final"),
        (CORRUPT, {}, "dead-letter it (corrupt_record)"),
        (COMPLETED, {}, "answered with the stored result, for another 1 h"),
        (DISCARDED, {}, "recognized as a duplicate of an event that was discarded, for another 1 h"),
        (replace(COMPLETED, result=None), {}, "its result was not stored"),
        (replace(COMPLETED, result=None, result_dropped=True), {}, "ResultDroppedError"),
        (FAILED, {}, "dead-letter it (previously_failed), for another 1 h; a replay of its dead letter is handled"),
        (HELD, {}, "would wait for the outcome of the current run; a worker does not commit its offset"),
        (HELD, {}, "attempt 2 takes over when the lease ends in 1 min 40 s"),
        (HELD, {"on_in_progress": OnInProgress.RAISE}, "InProgressError; a worker retries it"),
        (HELD, {"on_in_progress": OnInProgress.SKIP}, "acknowledge it without handling it"),
        (LAPSED, {}, "taken over and handled, as attempt 2"),
        (replace(LAPSED, attempt=2), {}, "as attempt 3; a failure would be final (max_attempts = 3)"),
        (replace(LAPSED, attempt=3), {}, "not be handled: CrashedTooOftenError"),
        (RELEASED, {}, "handled again, as attempt 2"),
        (replace(RELEASED, attempt=3), {}, "handled again, as attempt 4; a failure would be final"),
    ],
)
def test_predictions_of_the_next_delivery(
    found: IdempotencyRecord | Corrupt | None, config: dict[str, Any], expected: str
) -> None:
    assert expected in NextDelivery(CONFIG.model_copy(update=config)).describe(found)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (replace(LAPSED, attempt=2, lapsed=1), "taken over and handled, as attempt 3, alone in its process"),
        (replace(LAPSED, attempt=9, lapsed=8), "as attempt 10, alone in its process"),
        (replace(LAPSED, attempt=5, lapsed=4, lapsed_alone=2, alone=True), "not be handled: CrashedTooOftenError"),
        (
            replace(LAPSED, attempt=5, lapsed=4, lapsed_alone=2),
            "as attempt 6, alone in its process; a failure would",
        ),
        (
            replace(RELEASED, attempt=4, lapsed=2),
            "handled again, as attempt 5, alone in its process; a failure would",
        ),
        (replace(RELEASED, attempt=2, lapsed=1), "handled again, as attempt 3"),
    ],
)
def test_predictions_for_a_worker_that_isolates_suspects(found: IdempotencyRecord, expected: str) -> None:
    text = NextDelivery(CONFIG, isolates=True).describe(found)

    assert expected in text
    assert ("alone in its process" in text) == ("alone in its process" in expected)


RULES = (
    retry(ConnectionError, TimeoutError, attempts=20),
    retry_later(OSError, delay=300),
    discard(KeyError),
    dead_letter(ValueError),
    stop(ArithmeticError),
)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (RELEASED, "as attempt 2; by its rules, ConnectionError or TimeoutError is retried, at most 20 attempts,"),
        (RELEASED, "OSError is retried after 5 min, at most 3 attempts, KeyError is discarded"),
        (RELEASED, "ValueError is dead-lettered, ArithmeticError stops the service"),
        (replace(RELEASED, attempt=5), "as attempt 6; a failure would be final (max_attempts = 3); by its rules,"),
        (replace(RELEASED, attempt=5), "OSError is final (attempts = 3), KeyError is discarded"),
        (replace(RELEASED, attempt=19), "ConnectionError or TimeoutError is final (attempts = 20)"),
        (None, "as attempt 1 of at most 3; by its rules, ConnectionError"),
        (replace(LAPSED, attempt=3), "taken over and handled, as attempt 4"),
        (replace(LAPSED, attempt=20), "not be handled: CrashedTooOftenError"),
        (replace(LAPSED, attempt=4, lapsed=2), "not be handled: CrashedTooOftenError"),
    ],
)
def test_predictions_follow_the_rules_of_the_handler(found: IdempotencyRecord | None, expected: str) -> None:
    assert expected in NextDelivery(CONFIG, rules=RULES).describe(found)


def test_unknown_rules_are_mentioned_where_they_could_change_the_prediction() -> None:
    unknown = NextDelivery(CONFIG, rules=None)

    assert unknown.describe(replace(RELEASED, attempt=5)).endswith(
        "a failure would be final (max_attempts = 3), unless a rule for the error says otherwise (to see the rules, "
        "use --app)"
    )
    assert unknown.describe(RELEASED) == NextDelivery(CONFIG).describe(RELEASED)
    assert unknown.describe(COMPLETED) == NextDelivery(CONFIG).describe(COMPLETED)


def test_an_explanation_contains_the_rules() -> None:
    explained = RecordExplanation(parse_key(KEY, "idempotency"), RELEASED, CONFIG, "", rules=RULES[:1])
    unknown = replace(explained, rules=None)

    assert dict(rows(explained))["attempts"] == "1 of at most 3, unless a rule for the error says otherwise"
    assert dict(rows(unknown))["attempts"] == "1 of at most 3"
    shown = [
        explanation_json(Explanation("", "", [one]), whole_result=False)["records"][0] for one in (explained, unknown)
    ]
    assert [one["failure_rules"] for one in shown] == [["retry(ConnectionError, TimeoutError, attempts=20)"], None]


@pytest.mark.parametrize(
    ("replay", "expected"),
    [
        (COMPLETED, "generation 2, is completed, and another replay of its dead letter would be skipped"),
        (FAILED, "generation 2, failed as well: replay the dead letter of that generation"),
        (HELD, "generation 2, is still in progress"),
        (CORRUPT, "generation 2, has a corrupt record"),
    ],
)
def test_a_failed_record_with_a_replay_describes_the_replay(replay: IdempotencyRecord | Corrupt, expected: str) -> None:
    generations = {1: FAILED, 2: replay}

    assert expected in NextDelivery(CONFIG).describe(FAILED, replayed=newest_after(0, generations))
    assert newest_after(2, generations) is None


def test_predictions_for_callers_do_not_mention_workers() -> None:
    next_delivery = NextDelivery(CONFIG, by_worker=False)

    assert not any("worker" in next_delivery.describe(found) for found in (FAILED, HELD, CORRUPT))
    assert not any("dead letter" in next_delivery.describe(found) for found in (FAILED, HELD, CORRUPT))
    assert "at most 30 s" in next_delivery.describe(HELD)
    assert "it runs again once the record is gone" in next_delivery.describe(FAILED)


@pytest.mark.parametrize("found", [None, COMPLETED, FAILED, HELD, CORRUPT])
def test_a_service_that_observes_would_handle_every_delivery(found: IdempotencyRecord | Corrupt | None) -> None:
    expected = "would be handled: the service only observes (mode = observe)"

    assert NextDelivery(CONFIG, observes=True).describe(found) == expected


def test_a_duplicate_of_an_observed_delivery_has_no_result() -> None:
    found = replace(COMPLETED, result=observed_result("orders[3]@17"))

    assert "a duplicate of orders[3]@17, whose handling was only observed" in NextDelivery(CONFIG).describe(found)


def test_a_different_payload_takes_precedence() -> None:
    found = replace(COMPLETED, fingerprint=b"a" * 16)

    assert "key_reused" in NextDelivery(CONFIG).describe(found, b"b" * 16)
    assert "unguarded" in NextDelivery(CONFIG.model_copy(update={"on_key_reused": OnKeyReused.RUN})).describe(
        found, b"b" * 16
    )
    assert "stored result" in NextDelivery(CONFIG).describe(found, b"a" * 16)
    assert "stored result" in NextDelivery(CONFIG).describe(COMPLETED, b"b" * 16)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "250 ms"), (5, "5.0 s"), (59.6, "1 min"), (90, "1 min 30 s"), (86_400, "1 d"), (90_061, "1 d 1 h")],
)
def test_durations_are_formatted_with_at_most_two_units(seconds: float, text: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == text
