"""What a store remembers, and what it answers.  Pure data: no clock, no driver, no decision.

    absent ──reserve──► processing(attempt 1) ──complete──► completed ──ttl──► absent
                          │   ▲                └──fail────► failed ────ttl──► absent
                          │   └── lease ended, reserve: attempt + 1, new token (one winner)
                          └── release: the lease ends now

That is the way of one key.  Every arrow is one atomic step of the store, by the store's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Final, TypeAlias

from integr8s_idem._util.fast_dataclass import quick

JSON: Final = "application/json"


class IdempotencyStatus(str, Enum):
    """Where one unit of work stands.  A released reservation is `processing` with a lease that has ended."""

    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"


class Previous(str, Enum):
    """What became of the run before this one."""

    NONE = "none"
    """There was none: this is the first run, or the store has forgotten the earlier ones."""
    RELEASED = "released"
    """Its owner gave the key back, after a failure or a shutdown."""
    LAPSED = "lapsed"
    """Its lease ended without a word: the owner crashed or stalled.  This run is a takeover."""


@quick
@dataclass(frozen=True, slots=True)
class StoredResult:
    """What a handler returned, as bytes and their media type."""

    body: bytes
    content_type: str = JSON


@quick
@dataclass(frozen=True, slots=True)
class TraceLink:
    """The span that did the work: 16 bytes of trace id, 8 of span id (W3C Trace Context)."""

    trace_id: bytes
    span_id: bytes


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequest:
    """The wish to do one unit of work."""

    key: str
    """Full key, prefix and scope included; printable ASCII, at most 255 bytes."""
    token: bytes
    """16 random bytes made by the caller, one per wish: a repeated call finds its own record."""
    lease: timedelta
    """How long the reservation holds without renewal, by the store's clock."""
    retention: timedelta
    """How long the record lives if nobody touches it again; longer than the lease, so that attempts count."""
    fingerprint: bytes | None = None
    """16 bytes that name the payload; `None` where equal keys mean equal work whatever the payload."""
    owner: str = ""
    """Who asks, for messages: `billing@host-7`.  At most 128 characters."""
    trace: TraceLink | None = None
    alone: bool = False
    """Whether the attempt runs alone in its process: if it lapses, nothing else can have crashed that process."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """We may do the work, until the lease ends, as long as nobody holds a higher `fence`."""

    key: str
    token: bytes
    attempt: int
    """Number of this run, 1 for the first; crashed runs count."""
    fence: int
    """Grows with every reservation of the key, even after eviction: max(previous + 1, store clock in µs)."""
    lease: timedelta
    previous: Previous = Previous.NONE
    lapsed: int = 0
    """Number of earlier attempts whose lease ended without a word."""
    lapsed_alone: int = 0
    """Number of those that ran alone in their process."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class InProgress:
    """Somebody else holds the key; ask again after `retry_after` at the latest."""

    key: str
    attempt: int
    retry_after: timedelta
    """What is left of the lease, by the store's clock."""
    owner: str = ""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The work is done; `result` is what it returned."""

    key: str
    attempt: int
    completed_at: datetime
    result: StoredResult | None = None
    """`None` if results are not kept, or this one was dropped."""
    result_dropped: bool = False
    """The result was too large or could not be encoded; the protection stayed."""
    trace: TraceLink | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The work was given up."""

    key: str
    attempt: int
    failed_at: datetime
    error: str
    trace: TraceLink | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReused:
    """The key is known with another payload."""

    key: str
    stored: bytes
    offered: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt:
    """The record cannot be read.  It spoils no batch and is never taken for absent."""

    key: str
    reason: str


Verdict: TypeAlias = Reserved | InProgress | Completed | Failed | KeyReused | Corrupt
"""The answer to `reserve`."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The work of `reservation` is done."""

    reservation: Reserved
    ttl: timedelta
    """How long the outcome is remembered, from now, by the store's clock."""
    result: StoredResult | None = None
    result_dropped: bool = False


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The work of `reservation` is given up."""

    reservation: Reserved
    ttl: timedelta
    error: str
    """One line for people, at most 1024 characters; shortened by the manager, never by a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotencyRecord:
    """One record as the store holds it, for people and tools.  Times are the store's, in UTC."""

    key: str
    status: IdempotencyStatus
    attempt: int
    fence: int
    lease_until: datetime | None = None
    """While processing: when the lease ends; `None` once released."""
    settled_at: datetime | None = None
    """When it was completed or failed."""
    expires_at: datetime | None = None
    """When the store forgets it."""
    fingerprint: bytes | None = None
    owner: str = ""
    """Who holds or last held it; kept while processing."""
    result: StoredResult | None = None
    result_dropped: bool = False
    error: str = ""
    trace: TraceLink | None = None
    lapsed: int = 0
    """While processing: number of earlier attempts whose lease ended without a word."""
    lapsed_alone: int = 0
    """While processing: number of those that ran alone in their process."""
    alone: bool = False
    """While processing: whether the present attempt runs alone in its process."""
    seen_at: datetime | None = field(default=None, compare=False)
    """When it was read: what is left of its lease follows without another clock.  `None` if the store does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """What `ping` found."""

    kind: str
    """`redis`, `memory`, …"""
    version: str
    latency: timedelta
    """Round trip of the ping, by the caller's monotonic clock."""
    warnings: tuple[str, ...] = ()
    """What would lose records: an eviction policy, a missing replica.  Each says what to do.

    A `StoreWarning` has a code and its parts besides, for `integr8s-idem doctor`.
    """
    identity: str = ""
    """Names what the store holds: another one later means that it was emptied or replaced.  Empty if it cannot tell."""
    lineage: tuple[str, str] = ("", "")
    """This primary, and the one whose place it took, if any: its last writes may be lost.  Empty if it cannot tell."""
    start: str = ""
    """Names this start of the server: another one later means that it was started anew.  Empty if it cannot tell."""
    keeps_all: bool = False
    """Whether a start anew loses nothing that was acknowledged, as far as it can tell."""
