"""Format records as text and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from integr8s_idem._util.escaping import printable
from integr8s_idem.engine.results import discarded_error, observed_place
from integr8s_idem.engine.step_slots import step_name
from integr8s_idem.operations.keys.explanation import Explanation, MissingRecord, RecordExplanation
from integr8s_idem.operations.keys.key_parser import ParsedKey, parse_key
from integr8s_idem.operations.keys.next_delivery import format_duration
from integr8s_idem.operations.keys.record_changes import ChangeSummary
from integr8s_idem.operations.keys.record_reader import AnyRecord
from integr8s_idem.operations.keys.record_state import Lease, RecordState, status_of
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus, StoredResult

RESULT_PREVIEW: Final = 200
"""Number of characters of a result that are shown by default."""


def record_json(found: AnyRecord, parsed: ParsedKey, *, body: int = 0) -> dict[str, Any]:
    """Return a record, JSON-serializable, with at most `body` bytes of its result."""
    names = {
        "key": found.key,
        "label": parsed.label,
        "service": parsed.scope,
        "handler": parsed.handler,
        "event_type": parsed.event_type,
        "made_of": parsed.source or ("hash" if parsed.digest else "caller"),
        "value": parsed.value,
        "generation": parsed.generation,
        "step": parsed.step,
        "status": status_of(found),
    }
    if isinstance(found, Corrupt):
        return {**names, "reason": found.reason}
    state = RecordState(found)
    return {
        **names,
        "attempt": found.attempt,
        "fence": found.fence,
        "lease": state.lease.value if state.lease else None,
        "lease_until": _iso(found.lease_until),
        "lease_left_seconds": state.lease_left.total_seconds() if found.lease_until else None,
        "owner": found.owner,
        "reserved_at": _iso(state.reserved_at),
        "settled_at": _iso(found.settled_at),
        "expires_at": _iso(found.expires_at),
        "seen_at": _iso(found.seen_at),
        "age_seconds": state.age.total_seconds(),
        "fingerprint": found.fingerprint.hex() if found.fingerprint else None,
        "trace_id": found.trace.trace_id.hex() if found.trace else None,
        "span_id": found.trace.span_id.hex() if found.trace else None,
        "result": _result_json(found.result, body) if found.result else None,
        "result_dropped": found.result_dropped,
        "discarded": state.discarded is not None,
        "error": found.error or state.discarded or "",
    }


def _result_json(result: StoredResult, limit: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"content_type": result.content_type, "bytes": len(result.body)}
    if not limit:
        return fields
    body = result.body[:limit]
    try:
        return {**fields, "text": body.decode()}
    except UnicodeDecodeError:
        return {**fields, "base64": base64.b64encode(body).decode()}


def explanation_json(answer: Explanation, *, whole_result: bool) -> dict[str, Any]:
    return {
        "asked": answer.asked,
        "read_as": answer.read_as,
        "records": [_record_explanation_json(explained, whole_result) for explained in answer.records],
        "absent": [_missing_json(absent) for absent in answer.absent],
        "notes": answer.notes,
        "more": answer.more,
    }


def _record_explanation_json(explained: RecordExplanation, whole_result: bool) -> dict[str, Any]:
    prefix = explained.config.key_prefix
    limit = len(_body(explained.found)) if whole_result else RESULT_PREVIEW
    related = {
        "generations": {
            number: record_json(one, parse_key(one.key, prefix)) for number, one in explained.generations.items()
        },
        "steps": {
            place: {**record_json(one, parse_key(one.key, prefix)), "name": _step_name(one)}
            for place, one in explained.steps.items()
        },
    }
    record = record_json(explained.found, explained.parsed, body=max(limit, 1))
    failed = status_of(explained.found) == "failed"
    dead_letters = explained.dead_letters if failed and explained.dead_letters else None
    rules = None if explained.rules is None else [str(rule) for rule in explained.rules]
    next_delivery = {"next_delivery": explained.next_delivery, "failure_rules": rules}
    return {**record, **next_delivery, **related, "dead_letters": dead_letters}


def _missing_json(absent: MissingRecord) -> dict[str, Any]:
    return {
        "service": absent.service,
        "handler": absent.handler,
        "event_type": absent.event_type,
        "key": absent.key or None,
        "guarded": bool(absent.key),
        "next_delivery": absent.next_delivery,
    }


def heading(explained: RecordExplanation) -> str:
    """Return the label and status of a record."""
    return printable(f"{explained.parsed.label}: {status_of(explained.found)}")


def rows(explained: RecordExplanation, *, whole_result: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the rows of a record's description, as names and values."""
    yield "key", explained.found.key
    if isinstance(explained.found, Corrupt):
        yield "handled", "unknown: the record is corrupt"
        yield "reason", printable(explained.found.reason)
    else:
        yield from _record_rows(explained, explained.found, whole_result)
    for generation, found in explained.generations.items():
        yield f"generation {generation}", _short_text(found)
    for place, found in explained.steps.items():
        yield f"step {place}", printable(f"{_step_name(found) or '(unnamed)'}: {_short_text(found)}")
    yield "next delivery", explained.next_delivery


def _record_rows(
    explained: RecordExplanation, record: IdempotencyRecord, whole_result: bool
) -> Iterator[tuple[str, str]]:
    state = RecordState(record)
    yield "handled", printable(_handled(explained, state))
    yield "last run", _moment(state.reserved_at, state.now)
    if record.settled_at is not None:
        yield record.status.value, _moment(record.settled_at, state.now)
    but = ", unless a rule for the error says otherwise" if explained.rules else ""
    yield "attempts", f"{record.attempt} of at most {explained.config.max_attempts}{but}"
    if state.lease is Lease.HELD:
        yield "lease", f"ends in {format_duration(state.lease_left)} unless renewed, {_moment(record.lease_until)}"
    if state.lease is Lease.SCHEDULED:
        due = f"attempt {record.attempt + 1} is due in {format_duration(state.lease_left)}"
        yield "scheduled", f"{due}, {_moment(record.lease_until)}"
    if state.lease is Lease.LAPSED:
        yield "lease", f"ended {format_duration(state.lease_left)} ago, {_moment(record.lease_until)}"
    if error := record.error or state.discarded:
        yield "error", printable(error)
    if record.status is IdempotencyStatus.FAILED and explained.dead_letters:
        yield "dead letter", f"in {explained.dead_letters}, unless the event came from a topic of another name"
    yield from _trace_rows(record)
    yield "stored", _stored(record, whole_result)
    if record.fingerprint is not None:
        yield "fingerprint", f"{record.fingerprint.hex()}; {explained.other_payloads}"
    yield "fence", str(record.fence)
    yield "kept until", _moment(record.expires_at) if record.expires_at else "deleted manually"


def _trace_rows(record: IdempotencyRecord) -> Iterator[tuple[str, str]]:
    """Yield each id alone on its row, so that it can be copied into a search."""
    if record.trace is None:
        yield "trace", "not recorded: spans are off, or its trace was not sampled"
        return
    yield "trace", record.trace.trace_id.hex()
    yield "span", record.trace.span_id.hex()


def _handled(explained: RecordExplanation, state: RecordState) -> str:
    parsed, record = explained.parsed, state.record
    service = parsed.scope or "?"
    who = f"{service} (handler {parsed.handler})" if parsed.handler else service
    if state.discarded is not None:
        return f"discarded by {who}: its handler failed with an error that a rule discards"
    if observed_place(record.result) is not None:
        return f"yes, or discarded by a rule, by {who}: records of observe mode do not say which"
    if record.status is IdempotencyStatus.COMPLETED:
        return f"yes, by {who}"
    if record.status is IdempotencyStatus.FAILED:
        return f"{_replay_outcome(explained)}failed in {who}"
    owner = record.owner or "an unnamed owner"
    return {
        Lease.HELD: f"not yet: in progress at {owner}, for {who}",
        Lease.SCHEDULED: f"not yet: scheduled by {owner} for another attempt, for {who}",
        Lease.LAPSED: f"no: the lease of {owner} expired without an outcome, for {who}; the owner crashed or stalled",
        Lease.RELEASED: f"not yet: released by {owner}, for {who}, after a failure, at a shutdown or by an operator",
    }[state.lease or Lease.RELEASED]


def _replay_outcome(explained: RecordExplanation) -> str:
    """Return whether a replay has been handled, as the beginning of a sentence."""
    if explained.replayed is None:
        return "no: "
    generation, found = explained.replayed
    is_done = not isinstance(found, Corrupt) and found.status is IdempotencyStatus.COMPLETED
    return f"yes, as generation {generation}; before, it " if is_done else "no: "


def _stored(record: IdempotencyRecord, whole: bool) -> str:
    if record.result_dropped:
        return "no result: it was too large or could not be encoded"
    if discarded_error(record.result) is not None:
        return "no result"
    if (place := observed_place(record.result)) is not None:
        return printable(f"no result: the service only observed the handling of {place}")
    if record.result is None:
        return "nothing yet" if record.status is IdempotencyStatus.PROCESSING else "no result"
    size = f"{len(record.result.body):,} bytes of {record.result.content_type}"
    try:
        text = record.result.body.decode()
    except UnicodeDecodeError:
        text = record.result.body.hex()
    more = len(text) > RESULT_PREVIEW and not whole
    preview = text[:RESULT_PREVIEW] if more else text
    return printable(f"{size}: {preview}") + ("… (use --result to show all)" if more else "")


def _body(found: AnyRecord) -> bytes:
    return b"" if isinstance(found, Corrupt) or found.result is None else found.result.body


def _step_name(found: AnyRecord) -> str:
    return "" if isinstance(found, Corrupt) or found.result is None else step_name(found.result)


def _short_text(found: AnyRecord) -> str:
    if isinstance(found, Corrupt):
        return printable(f"corrupt: {found.reason}")
    state = RecordState(found)
    error = f": {found.error}" if found.error else ""
    if state.discarded is not None:
        error = f", discarded: {state.discarded}"
    return printable(f"{found.status.value} {format_duration(state.age)} ago, {_times(found.attempt)}{error}")


def _times(attempt: int) -> str:
    return "once" if attempt == 1 else f"{attempt} times"


def missing_line(absent: MissingRecord) -> str:
    """Describe a handler without a record on one line."""
    handler = " ".join(part for part in (absent.service, absent.handler, absent.event_type) if part)
    if not absent.key:
        return printable(f"{handler}: not guarded; {absent.next_delivery}")
    return printable(f"{handler}: never seen or expired; {absent.next_delivery}")


def list_row(found: AnyRecord, parsed: ParsedKey) -> tuple[str, str, str, str, str]:
    """Return the columns of a list: status, age, attempts, details, key."""
    if isinstance(found, Corrupt):
        return "corrupt", "", "", printable(found.reason), found.key
    state = RecordState(found)
    return found.status.value, format_duration(state.age), str(found.attempt), _details(state), found.key


def _details(state: RecordState) -> str:
    record = state.record
    if state.lease is Lease.HELD:
        return f"lease ends in {format_duration(state.lease_left)}"
    if state.lease is Lease.LAPSED:
        return f"lease ended {format_duration(state.lease_left)} ago"
    if state.lease is Lease.SCHEDULED:
        return f"scheduled in {format_duration(state.lease_left)}"
    if state.lease is Lease.RELEASED:
        return "released"
    if state.discarded is not None:
        return printable(f"discarded: {state.discarded}")
    return f"expires in {format_duration(record.expires_at - state.now)}" if record.expires_at else "kept"


def summary_text(summary: ChangeSummary) -> str:
    """Format counts: `1,234 records (billing: 1,200 completed, 34 failed)`."""
    services: dict[str, list[str]] = {}
    for (service, state), number in sorted(summary.by.items()):
        services.setdefault(service or "?", []).append(f"{number:,} {state}")
    by = "; ".join(f"{printable(service)}: {', '.join(states)}" for service, states in services.items())
    return f"{summary.records:,} record{'' if summary.records == 1 else 's'}" + (f" ({by})" if by else "")


def _moment(moment: datetime | None, now: datetime | None = None) -> str:
    if moment is None:
        return ""
    text = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    if now is None:
        return text
    since = now - moment
    return f"{text}, {format_duration(since)} ago" if since >= timedelta() else text


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None
