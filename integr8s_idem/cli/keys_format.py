"""Records in words and as JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, Final

from integr8s_idem._util.escaping import printable
from integr8s_idem.engine.steps import step_name
from integr8s_idem.operations.keys.explanation import Absent, Account, Explanation
from integr8s_idem.operations.keys.key_parser import Named, named
from integr8s_idem.operations.keys.next_delivery import span
from integr8s_idem.operations.keys.record_changes import Counted
from integr8s_idem.operations.keys.record_reader import Found
from integr8s_idem.operations.keys.record_state import Lease, Standing, state_of
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus, StoredResult

BEGINNING: Final = 200
"""Characters of a result that are shown of themselves."""


def record_json(found: Found, told: Named, *, body: int = 0) -> dict[str, Any]:
    """A record for scripts; `body`: how many bytes of its result, at most."""
    names = {
        "key": found.key,
        "label": told.label,
        "service": told.scope,
        "handler": told.handler,
        "event_type": told.event_type,
        "made_of": told.how or ("hash" if told.digest else "caller"),
        "value": told.value,
        "generation": told.generation,
        "step": told.step,
        "status": state_of(found),
    }
    if isinstance(found, Corrupt):
        return {**names, "reason": found.reason}
    standing = Standing(found)
    return {
        **names,
        "attempt": found.attempt,
        "fence": found.fence,
        "lease": standing.lease.value if standing.lease else None,
        "lease_until": _iso(found.lease_until),
        "lease_left_seconds": standing.lease_left.total_seconds() if found.lease_until else None,
        "owner": found.owner,
        "reserved_at": _iso(standing.reserved_at),
        "settled_at": _iso(found.settled_at),
        "expires_at": _iso(found.expires_at),
        "seen_at": _iso(found.seen_at),
        "age_seconds": standing.age.total_seconds(),
        "fingerprint": found.fingerprint.hex() if found.fingerprint else None,
        "trace_id": found.trace.trace_id.hex() if found.trace else None,
        "span_id": found.trace.span_id.hex() if found.trace else None,
        "result": _result_json(found.result, body) if found.result else None,
        "result_dropped": found.result_dropped,
        "error": found.error,
    }


def _result_json(result: StoredResult, most: int) -> dict[str, Any]:
    told: dict[str, Any] = {"content_type": result.content_type, "bytes": len(result.body)}
    if not most:
        return told
    body = result.body[:most]
    try:
        return {**told, "text": body.decode()}
    except UnicodeDecodeError:
        return {**told, "base64": base64.b64encode(body).decode()}


def explanation_json(answer: Explanation, *, whole_result: bool) -> dict[str, Any]:
    return {
        "asked": answer.asked,
        "read_as": answer.read_as,
        "records": [_account_json(account, whole_result) for account in answer.accounts],
        "absent": [_absent_json(absent) for absent in answer.absent],
        "notes": answer.notes,
        "more": answer.more,
    }


def _account_json(account: Account, whole_result: bool) -> dict[str, Any]:
    prefix = account.config.key_prefix
    most = len(_body(account.found)) if whole_result else BEGINNING
    below = {
        "generations": {
            number: record_json(one, named(one.key, prefix)) for number, one in account.generations.items()
        },
        "steps": {
            place: {**record_json(one, named(one.key, prefix)), "name": _step_name(one)}
            for place, one in account.steps.items()
        },
    }
    record = record_json(account.found, account.told, body=max(most, 1))
    failed = state_of(account.found) == "failed"
    dead_letters = account.dead_letters if failed and account.dead_letters else None
    return {**record, "next_delivery": account.outlook, **below, "dead_letters": dead_letters}


def _absent_json(absent: Absent) -> dict[str, Any]:
    return {
        "service": absent.service,
        "handler": absent.handler,
        "event_type": absent.event_type,
        "key": absent.key or None,
        "guarded": bool(absent.key),
        "next_delivery": absent.outlook,
    }


def heading(account: Account) -> str:
    """What it is, and how it stands, in a line."""
    return printable(f"{account.told.label}: {state_of(account.found)}")


def rows(account: Account, *, whole_result: bool = False) -> Iterator[tuple[str, str]]:
    """What people want to know of a record, one thing a row."""
    yield "key", account.found.key
    if isinstance(account.found, Corrupt):
        yield "handled", "unknown: its record cannot be read"
        yield "why", printable(account.found.reason)
    else:
        yield from _record_rows(account, account.found, whole_result)
    for generation, found in account.generations.items():
        yield f"generation {generation}", _in_short(found)
    for place, found in account.steps.items():
        yield f"step {place}", printable(f"{_step_name(found) or '(unnamed)'}: {_in_short(found)}")
    yield "next delivery", account.outlook


def _record_rows(account: Account, record: IdempotencyRecord, whole_result: bool) -> Iterator[tuple[str, str]]:
    standing = Standing(record)
    yield "handled", printable(_handled(account, standing))
    yield "last run", _moment(standing.reserved_at, standing.now)
    if record.settled_at is not None:
        yield record.status.value, _moment(record.settled_at, standing.now)
    yield "tried", f"{_times(record.attempt)}; max_attempts is {account.config.max_attempts}"
    if standing.lease is Lease.HELD:
        yield "lease", f"ends in {span(standing.lease_left)} unless it is renewed, {_moment(record.lease_until)}"
    if standing.lease is Lease.LAPSED:
        yield "lease", f"ended {span(standing.lease_left)} ago, {_moment(record.lease_until)}"
    if record.error:
        yield "error", printable(record.error)
    if record.status is IdempotencyStatus.FAILED and account.dead_letters:
        yield "dead letter", f"in {account.dead_letters}, unless it came by a topic of another name"
    yield "trace", f"{record.trace.trace_id.hex()}, span {record.trace.span_id.hex()}" if record.trace else "none"
    yield "stored", _stored(record, whole_result)
    if record.fingerprint is not None:
        yield "fingerprint", f"{record.fingerprint.hex()}; another payload under this key is refused"
    yield "fence", str(record.fence)
    yield "kept until", _moment(record.expires_at) if record.expires_at else "somebody deletes it"


def _handled(account: Account, standing: Standing) -> str:
    told, record = account.told, standing.record
    service = told.scope or "?"
    who = f"{service} (handler {told.handler})" if told.handler else service
    if record.status is IdempotencyStatus.COMPLETED:
        return f"yes, by {who}"
    if record.status is IdempotencyStatus.FAILED:
        return f"{_later(account)}{who} gave it up"
    owner = record.owner or "an owner without a name"
    return {
        Lease.HELD: f"not yet: {owner} is at it, for {who}",
        Lease.LAPSED: f"no: the lease of {owner} ended without a word, for {who}; it crashed, or stalled",
        Lease.RELEASED: f"not yet: {owner} gave it back, for {who}, after a failure, at a shutdown or by an operator",
    }[standing.lease or Lease.RELEASED]


def _later(account: Account) -> str:
    """Whether a replay of what was given up has been handled."""
    if account.replayed is None:
        return "no: "
    generation, found = account.replayed
    is_done = not isinstance(found, Corrupt) and found.status is IdempotencyStatus.COMPLETED
    return f"yes, as generation {generation}; at first " if is_done else "no: "


def _stored(record: IdempotencyRecord, whole: bool) -> str:
    if record.result_dropped:
        return "no result: it was too large, or could not be encoded"
    if record.result is None:
        return "nothing yet" if record.status is IdempotencyStatus.PROCESSING else "no result"
    told = f"{len(record.result.body):,} bytes of {record.result.content_type}"
    try:
        text = record.result.body.decode()
    except UnicodeDecodeError:
        text = record.result.body.hex()
    more = len(text) > BEGINNING and not whole
    return printable(f"{told}: {text[:BEGINNING] if more else text}") + ("… (--result for all)" if more else "")


def _body(found: Found) -> bytes:
    return b"" if isinstance(found, Corrupt) or found.result is None else found.result.body


def _step_name(found: Found) -> str:
    return "" if isinstance(found, Corrupt) or found.result is None else step_name(found.result)


def _in_short(found: Found) -> str:
    if isinstance(found, Corrupt):
        return printable(f"cannot be read: {found.reason}")
    standing = Standing(found)
    error = f": {found.error}" if found.error else ""
    return printable(f"{found.status.value} {span(standing.age)} ago, {_times(found.attempt)}{error}")


def _times(attempt: int) -> str:
    return "once" if attempt == 1 else f"{attempt} times"


def absent_line(absent: Absent) -> str:
    """A handler without a record, in a line."""
    what = " ".join(part for part in (absent.service, absent.handler, absent.event_type) if part)
    if not absent.key:
        return printable(f"{what}: not guarded; {absent.outlook}")
    return printable(f"{what}: never seen, or forgotten since; {absent.outlook}")


def line_of(found: Found, told: Named) -> tuple[str, str, str, str, str]:
    """Status, age, attempts, what becomes of it, key."""
    if isinstance(found, Corrupt):
        return "corrupt", "", "", printable(found.reason), found.key
    standing = Standing(found)
    return found.status.value, span(standing.age), str(found.attempt), _becomes(standing), found.key


def _becomes(standing: Standing) -> str:
    record = standing.record
    if standing.lease is Lease.HELD:
        return f"lease ends in {span(standing.lease_left)}"
    if standing.lease is Lease.LAPSED:
        return f"lease ended {span(standing.lease_left)} ago"
    if standing.lease is Lease.RELEASED:
        return "released"
    return f"expires in {span(record.expires_at - standing.now)}" if record.expires_at else "kept"


def counted_text(counted: Counted) -> str:
    """`1,234 records (billing: 1,200 completed, 34 failed)`."""
    services: dict[str, list[str]] = {}
    for (service, state), number in sorted(counted.by.items()):
        services.setdefault(service or "?", []).append(f"{number:,} {state}")
    by = "; ".join(f"{printable(service)}: {', '.join(states)}" for service, states in services.items())
    return f"{counted.records:,} record{'' if counted.records == 1 else 's'}" + (f" ({by})" if by else "")


def _moment(moment: datetime | None, now: datetime | None = None) -> str:
    if moment is None:
        return ""
    told = f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    if now is None:
        return told
    since = now - moment
    return f"{told}, {span(since)} ago" if since >= timedelta() else told


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None
