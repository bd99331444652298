"""The files of golden records: one folder for each minor version, one file for each store."""

from __future__ import annotations

import json
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from integr8s_idem.records import IdempotencyRecord, TraceLink
from tests.golden.scenarios import SCENARIOS, Life, key_of, make_all
from tests.golden.stores import RawSql, RawStore

FOLDER: Final = Path(__file__).parent

CURRENT: Final = ".".join(version("integr8s-idem").split(".")[:2])
"""Minor version of this code."""


def order_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def versions() -> list[str]:
    """Return the minor versions with golden records, oldest first."""
    return sorted((folder.name for folder in FOLDER.glob("[0-9]*.[0-9]*")), key=order_of)


def previous_version() -> str:
    """Return the minor version before the current one, whose workers must read what this code writes."""
    earlier = [version for version in versions() if order_of(version) < order_of(CURRENT)]
    return earlier[-1] if earlier else CURRENT


def path_of(version: str, kind: str) -> Path:
    return FOLDER / version / f"{kind}.json"


def read(version: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path_of(version, kind).read_text(encoding="utf-8"))
    return found


def write_new(kind: str, content: dict[str, Any]) -> Path:
    """Write a file of the current version.

    Raises:
        FileExistsError: It exists.
    """
    path = path_of(CURRENT, kind)
    path.parent.mkdir(exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True) + "\n")
    return path


async def written_by_this_version(store: RawStore) -> dict[str, Any]:
    """Make all records in an empty store, and return their raw form and what `get` says of them."""
    identity = (await store.repository.ping()).identity
    lives = await make_all(store.repository)
    if isinstance(store, RawSql):
        await store.put_messages()
    raw = await store.dump()
    records = {name: await _described(life) for name, life in lives.items()}
    return {"version": CURRENT, "identity": identity, "raw": raw, "records": records}


async def _described(life: Life) -> dict[str, Any]:
    (record,) = await life.store.get([life.key])
    shown = {"key": life.key, "fence": life.reservation.fence} if record is None else described(record)
    return {"token": life.tokens[-1].hex(), "record": shown}


def described(record: IdempotencyRecord) -> dict[str, Any]:
    """Return what a record says, as JSON, without the times at which leases and records end."""
    return {
        "key": record.key,
        "status": record.status.value,
        "attempt": record.attempt,
        "fence": record.fence,
        "has_lease": record.lease_until is not None,
        "settled_at": _moment(record.settled_at),
        "fingerprint": record.fingerprint.hex() if record.fingerprint else None,
        "owner": record.owner,
        "result": [record.result.content_type, record.result.body.hex()] if record.result else None,
        "result_dropped": record.result_dropped,
        "error": record.error,
        "trace": trace_text(record.trace),
        "lapsed": record.lapsed,
        "lapsed_alone": record.lapsed_alone,
        "alone": record.alone,
    }


def trace_text(trace: TraceLink | None) -> str | None:
    return None if trace is None else (trace.trace_id + trace.span_id).hex()


def _moment(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def differences(version: str, kind: str, store: RawStore, raw: dict[str, Any]) -> list[str]:
    """Return what is different in form from the records and messages of `version`, each beginning with its name."""
    golden = read(version, kind)["raw"]
    forms = {name: [_form(store, one["records"].get(key_of(name))) for one in (golden, raw)] for name in SCENARIOS}
    forms["outbox"] = [_without_times(one["other"].get("idempotency_outbox")) for one in (golden, raw)]
    return [f"{name}: {found} instead of {known}" for name, (known, found) in forms.items() if found != known]


def _without_times(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return raw messages without the column that version 4 of the schema added; earlier versions leave it alone."""
    return messages and [{name: value for name, value in row.items() if name != "created_at"} for row in messages]


def _form(store: RawStore, record: Any) -> Any:
    return None if record is None else store.masked(record)
