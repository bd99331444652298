"""Requests, verdicts and records: the data exchanged with a store.  Pure.

    absent ──reserve──► processing(attempt 1) ──complete──► completed ──ttl──► absent
                          │   ▲                └──fail────► failed ────ttl──► absent
                          │   └── lease ended, reserve: attempt + 1, new token (one winner)
                          └── release: the lease ends now; with a delay: scheduled, nobody has it until then

The diagram shows the states of one key.  Every arrow is one atomic step of the store, by the store's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Final, NamedTuple, TypeAlias, final

from msgspec import Struct

JSON: Final = "application/json"

_FIELD_SET_BYTES: Final = 4

NOBODY: Final = bytes(16)
"""Token of a record in processing that nobody holds, although its lease has not ended: the work is scheduled.

It is to be tried again when the lease ends.  Until then, the answer is `Scheduled`; version 0.2.0 answers `InProgress`.
An attempt that takes it over afterwards follows one that released the key, not a crash.
"""


def is_other_payload(stored: bytes | None, offered: bytes | None) -> bool:
    """Whether two fingerprints of one key show that it is used with another payload.

    A fingerprint whose first bit is 0 is compared whole.  If the first bit is 1, the first four bytes name the set of
    fields that the other twelve were computed from, and only fingerprints of the same set are compared: another version
    of the code, which knows one field more, computes another digest of the same payload.  A missing fingerprint equals
    every other.
    """
    if stored is None or offered is None or stored == offered:
        return False
    has_set = stored[:1] >= b"\x80" or offered[:1] >= b"\x80"
    return not has_set or stored[:_FIELD_SET_BYTES] == offered[:_FIELD_SET_BYTES]


class IdempotencyStatus(str, Enum):
    """The state of one unit of work.  A released reservation is `processing` with a lease that has ended."""

    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"


class Previous(str, Enum):
    """How the previous run ended."""

    NONE = "none"
    """There was no previous run, or the store has deleted its record."""
    RELEASED = "released"
    """Its owner released the key, after a failure or during shutdown."""
    LAPSED = "lapsed"
    """Its lease ended without an outcome: the owner crashed or stalled.  This run is a takeover."""


@final
class StoredResult(Struct, frozen=True, gc=False):
    """The result of a handler, as bytes and their media type."""

    body: bytes
    content_type: str = JSON


class TraceLink(Struct, frozen=True, gc=False):
    """The span that did the work: 16 bytes of trace id, 8 of span id (W3C Trace Context)."""

    trace_id: bytes
    span_id: bytes


class ReserveRequest(Struct, frozen=True, kw_only=True, gc=False):
    """A request to do one unit of work."""

    key: str
    """Full key, prefix and scope included; printable ASCII, at most 255 bytes."""
    token: bytes
    """16 random bytes chosen by the caller, one per request, so that a repeated call finds its own record.

    Never `NOBODY`.
    """
    lease: timedelta
    """How long the reservation is valid without renewal, by the store's clock."""
    retention: timedelta
    """How long the record is kept if it is not written again; longer than the lease, so that attempts are counted."""
    fingerprint: bytes | None = None
    """16 bytes that identify the payload; `None` if equal keys mean equal work regardless of the payload.

    Stores compare fingerprints with `is_other_payload` only: some name the set of fields that they were made of.
    """
    owner: str = ""
    """Name of the caller for messages, such as `billing@host-7`.  At most 128 characters."""
    trace: TraceLink | None = None
    alone: bool = False
    """Whether the attempt runs alone in its process: if it lapses, no other work can have crashed the process."""


@final
class Reserved(Struct, frozen=True, kw_only=True, gc=False):
    """The caller may do the work until the lease ends, unless another worker has a higher `fence`."""

    key: str
    token: bytes
    attempt: int
    """Number of this run, 1 for the first; crashed runs are counted."""
    fence: int
    """Increases with every reservation of the key, even after eviction: max(previous + 1, store clock in µs)."""
    lease: timedelta
    previous: Previous = Previous.NONE
    lapsed: int = 0
    """Number of earlier attempts whose lease ended without an outcome."""
    lapsed_alone: int = 0
    """How many of them ran alone in their process."""
    trace: TraceLink | None = None
    """Trace of the previous attempt, if its lease lapsed or its owner released it, and it was recorded.

    A repeated request, whose first answer was lost, may get `None`: most stores no longer have it then.
    """


class InProgress(Struct, frozen=True, kw_only=True, gc=False):
    """Another worker holds the key; ask again after `retry_after` at the latest."""

    key: str
    attempt: int
    retry_after: timedelta
    """The rest of the lease, by the store's clock."""
    owner: str = ""


class Scheduled(Struct, frozen=True, kw_only=True, gc=False):
    """An attempt failed, and the next one may not begin before `retry_after` has passed; nobody holds the key."""

    key: str
    attempt: int
    """Number of the attempt that failed."""
    retry_after: timedelta
    """Time until the work is due, by the store's clock."""
    owner: str = ""
    """Who scheduled it."""


@final
class Completed(Struct, frozen=True, kw_only=True, gc=False):
    """The work is done; `result` is its result."""

    key: str
    attempt: int
    completed_at: datetime
    result: StoredResult | None = None
    """`None` if results are not stored, or this one was dropped."""
    result_dropped: bool = False
    """Whether the result was too large or could not be encoded; the record still prevents another run."""
    trace: TraceLink | None = None


class Failed(Struct, frozen=True, kw_only=True, gc=False):
    """The work was given up."""

    key: str
    attempt: int
    failed_at: datetime
    error: str
    trace: TraceLink | None = None


class KeyReused(Struct, frozen=True, kw_only=True, gc=False):
    """The key was used with a different payload."""

    key: str
    stored: bytes
    offered: bytes


class Corrupt(Struct, frozen=True, kw_only=True, gc=False):
    """The record cannot be read.  It does not affect other keys of the batch and is never treated as absent."""

    key: str
    reason: str


Pending: TypeAlias = InProgress | Scheduled
"""A verdict on work whose outcome is not known yet: ask again after `retry_after`."""

Verdict: TypeAlias = Reserved | Pending | Completed | Failed | KeyReused | Corrupt
"""The answer to `reserve`."""


class Completion(Struct, frozen=True, kw_only=True, gc=False):
    """The work of `reservation` is done."""

    reservation: Reserved
    ttl: timedelta
    """How long the outcome is kept, from now, by the store's clock."""
    result: StoredResult | None = None
    result_dropped: bool = False


class Failure(Struct, frozen=True, kw_only=True, gc=False):
    """The work of `reservation` failed permanently."""

    reservation: Reserved
    ttl: timedelta
    error: str
    """One line of text, at most 1024 characters; shortened by the manager, not by the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """One record as stored, for people and tools.  Times are from the store's clock, in UTC."""

    key: str
    status: IdempotencyStatus
    attempt: int
    fence: int
    lease_until: datetime | None = None
    """While processing: when the lease ends, or scheduled work is due; `None` once released."""
    settled_at: datetime | None = None
    """When it was completed or failed."""
    expires_at: datetime | None = None
    """When the record expires."""
    fingerprint: bytes | None = None
    owner: str = ""
    """While processing: the current or last owner."""
    result: StoredResult | None = None
    result_dropped: bool = False
    error: str = ""
    trace: TraceLink | None = None
    lapsed: int = 0
    """While processing: number of earlier attempts whose lease ended without an outcome."""
    lapsed_alone: int = 0
    """While processing: how many of them ran alone in their process."""
    alone: bool = False
    """While processing: whether the current attempt runs alone in its process."""
    is_scheduled: bool = False
    """While processing: whether nobody holds it, since it is to be tried again at `lease_until`."""
    seen_at: datetime | None = field(default=None, compare=False)
    """When the record was read, by the store's clock, to compute the rest of its lease; `None` if unknown."""


class Database(NamedTuple):
    """The database of a store, in the terms of OpenTelemetry's conventions for databases."""

    system: str
    """`db.system.name`: `redis`, `postgresql`, `mysql`, `mariadb`, `sqlite`, `aws.dynamodb`, …"""
    namespace: str = ""
    """`db.namespace`: the name or number of the database within its server.  Empty if unknown."""
    address: str = ""
    """`server.address`: host name, address or socket of the server.  Empty if unknown, or if there are several."""
    port: int | None = None
    """`server.port`, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """The result of `ping`."""

    kind: str
    """`redis`, `memory`, …"""
    version: str
    latency: timedelta
    """Round trip of the ping, by the caller's monotonic clock."""
    warnings: tuple[str, ...] = ()
    """Conditions that lose records, such as an eviction policy or a missing replica, each with a remedy.

    A `StoreWarning` also has a code and its parts, for `integr8s-idem doctor`.
    """
    identity: str = ""
    """Identifies the data of the store; a change means that it was emptied or replaced.  Empty if unknown."""
    lineage: tuple[str, str] = ("", "")
    """This primary and the one it replaced, if any, whose last writes may be lost.  Empty if unknown."""
    start: str = ""
    """Identifies the process of the server; a change means that it was restarted.  Empty if unknown."""
    keeps_all: bool = False
    """Whether a restart is known to lose no acknowledged writes."""
