"""Meanings and targets of the figures, and the guarantees of the contestants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.limits import FORBIDDEN, LIMITS

MARGIN: Final = 0.1
"""Fraction by which a figure may miss its target: two runs on one machine differ by as much."""


@dataclass(frozen=True)
class Target:
    """The target of one figure."""

    meaning: str
    bound: float
    at_most: bool = False
    """Whether lower is better."""
    limit: str = ""
    """Known reason why it is missed, if any."""
    forbidden: str = ""
    """The measured limit because of which the target was dropped, if it was."""
    noise: float = 0.25
    """Fraction by which two runs of the same code may differ."""
    needs: str = ""
    """What must be installed to measure it, if it is optional."""

    def reached(self, value: float, *, margin: float = 0.0) -> bool:
        """Whether `value` reaches the target, or misses it by at most the fraction `margin`."""
        return value <= self.bound * (1 + margin) if self.at_most else value >= self.bound * (1 - margin)

    @property
    def margin(self) -> float:
        """Fraction by which the figure may miss the target."""
        return min(MARGIN, self.noise)

    def worse(self, now: float, before: float) -> bool:
        """Whether `now` is worse than `before` by more than the noise."""
        return now > before * (1 + self.noise) if self.at_most else now < before * (1 - self.noise)

    def __str__(self) -> str:
        if self.forbidden:
            return "dropped"
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}"


_NATIVE: Final = "make speedups"

_TARGETS: Final[Mapping[str, Target]] = {
    "single_fresh_c1": Target("`manager.run`, new keys, one at a time ÷ two redis-py calls", 1.0),
    "single_fresh_c64": Target("`manager.run`, new keys, 64 at once ÷ two redis-py calls", 3.2),
    "single_duplicate_c1": Target("`manager.run`, duplicates, one at a time ÷ a losing `SET NX`", 1.0),
    "single_duplicate_c64": Target("`manager.run`, duplicates, 64 at once ÷ a losing `SET NX`", 3.2),
    "single_fresh_c1_native": Target("as `single_fresh_c1`, with the native code", 1.0, needs=_NATIVE),
    "single_fresh_c64_native": Target("as `single_fresh_c64`, with the native code", 3.2, needs=_NATIVE),
    "single_duplicate_c1_native": Target("as `single_duplicate_c1`, with the native code", 1.0, needs=_NATIVE),
    "single_duplicate_c64_native": Target("as `single_duplicate_c64`, with the native code", 3.2, needs=_NATIVE),
    "local_duplicate": Target("duplicates of keys that this process completed ÷ a losing `SET NX`, one at a time", 30),
    "batch500_fresh": Target("`reserve` and `complete` in batches of 500 ÷ redis-py's pipelines of 500", 2.4),
    "kafka_noop": Target("idempotent service ÷ the same service with the plain dispatcher, no-op handler", 0.62),
    "kafka_default_order": Target(
        'idempotent service with `ordering = "partition"`, the default, and 8 partitions ÷ with `"none"`', 0.75
    ),
    "kafka_1ms": Target(
        "idempotent service ÷ the same service with the plain dispatcher, handler that awaits 1 ms, concurrency 64",
        0.75,
    ),
    "kafka_vs_raw_loop": Target("idempotent service ÷ a bare aiokafka loop", 0.18),
    "kafka_vs_faststream": Target("idempotent service ÷ FastStream's subscriber, `ACK_FIRST`", 1.5),
    "kafka_vs_raw_loop_native": Target(
        "idempotent service with the native code ÷ a bare aiokafka loop", 0.23, needs=_NATIVE
    ),
    "kafka_vs_faststream_native": Target(
        "idempotent service with the native code ÷ FastStream's subscriber, `ACK_FIRST`", 2.0, needs=_NATIVE
    ),
    "kafka_noop_native": Target("as `kafka_noop`, both services with the native code", 0.62, needs=_NATIVE),
    "kafka_default_order_native": Target(
        "as `kafka_default_order`, both services with the native code", 0.75, needs=_NATIVE
    ),
    "kafka_1ms_native": Target("as `kafka_1ms`, both services with the native code", 0.75, needs=_NATIVE),
    "kafka_vs_faststream_ack": Target("idempotent service ÷ FastStream's subscriber, `ACK`", 10),
    "telemetry_on": Target("idempotent service with metrics and spans, 10% sampled ÷ without", 0.8),
    "processes_2": Target(
        "events per CPU second of all processes, supervisor included: `run --processes 2` ÷ `run`", 0.9
    ),
    "redis_bytes_per_key": Target("`MEMORY USAGE` of a completed record without a result", 200, at_most=True, noise=0),
    "growth_2m": Target("rate with 2 million keys in the store ÷ rate with 10 thousand", 0.9),
    "http_guarded": Target(
        "CPU time of a FastAPI endpoint that does nothing, without the guard ÷ with it, new keys, 32 at once", 0.6
    ),
    "http_guarded_native": Target("as `http_guarded`, with the native code", 0.6, needs=_NATIVE),
    "sql_inbox_core": Target("business insert and record with SQLAlchemy Core ÷ Core without a guard", 0.75),
    "sql_inbox_session": Target(
        "business insert and record in a SQLAlchemy session ÷ the session without a guard", 0.75
    ),
    "vs_idemkit_fresh_c64": Target("`manager.run` ÷ idemkit, new keys, 64 at once", 5.0),
    "vs_idempotency_kit_fresh_c64": Target("`manager.run` ÷ idempotency-kit, new keys, 64 at once", 5.0),
    "latency_p99_ratio": Target(
        "p99 of a single guarded call at low load ÷ p99 of two redis-py calls", 1.15, at_most=True, noise=0.5
    ),
}

_REQUESTS: Final = "the two requests of this library alone, without a guard ÷ two redis-py calls"

RATIOS: Final[Mapping[str, str]] = {
    "single_fresh_c1_requests": f"{_REQUESTS}, new keys, sequentially",
    "single_fresh_c64_requests": f"{_REQUESTS}, new keys, 64 at once",
    "single_duplicate_c1_requests": "the first of them ÷ a losing `SET NX`, completed keys, sequentially",
    "single_duplicate_c64_requests": "the first of them ÷ a losing `SET NX`, completed keys, 64 at once",
    "single_fresh_c1_parts": (
        "the two requests with key, token and result, without anything else of a guard ÷ two redis-py calls, new keys, "
        "sequentially"
    ),
    "single_duplicate_c1_parts": "the first of these ÷ a losing `SET NX`, completed keys, sequentially",
    "kafka_noop_requests": (
        "plain service that makes the two requests of this library for 250 events together, without a guard ÷ plain "
        "service, no-op handler"
    ),
    "kafka_by_hand": "plain service whose handler calls redis-py twice, by hand ÷ plain service, no-op handler",
    "http_by_hand": (
        "CPU time of a FastAPI endpoint that does nothing, without the guard ÷ with two redis-py calls, 32 at once"
    ),
    "kafka_default_order_requests": (
        "idempotent service, no-op handler, outcomes recorded in requests of at most 8, as with `ordering = "
        '"partition"` ÷ the same, 250 per request, both `ordering = "none"`'
    ),
    "kafka_key_order": 'idempotent service with `ordering = "key"`, a key for each event ÷ with `"none"`',
    "kafka_one_partition": (
        'idempotent service with `ordering = "partition"` and one partition ÷ with `"none"` and 8 partitions'
    ),
    "kafka_1ms_requests": (
        "plain service whose handler awaits 1 ms and makes the two requests of this library, without a guard ÷ plain "
        "service, handler that awaits 1 ms"
    ),
    "http_requests": (
        "CPU time of a FastAPI endpoint that does nothing, without the guard ÷ with the two requests of this library "
        "alone, 32 at once"
    ),
    "telemetry_bound": "idempotent service, with spans of a tenth of its events by the SDK alone ÷ without telemetry",
    "speedups": "idempotent service with the native code ÷ the same service without it",
    "faststream_guarded": "FastStream's subscriber with the guard ÷ the same without it, both `NACK_ON_ERROR`",
    "sql_inbox": "business insert and record with SQLAlchemy Core ÷ the bare driver without a guard",
    "sql_inbox_by_hand": "business insert and record with SQLAlchemy Core ÷ the bare driver with a hand-written inbox",
    "sql_inbox_statements": (
        "business insert and two bare statements for an inbox, without a guard ÷ business insert, both with "
        "SQLAlchemy Core"
    ),
    "sql_inbox_store": (
        "business insert, and the calls of this library's store without the rest of the guard ÷ business insert, both "
        "with SQLAlchemy Core"
    ),
}
"""Meanings of the figures without a target."""

TARGETS: Final[Mapping[str, Target]] = {
    key: replace(target, limit=LIMITS.get(key, ""), forbidden=FORBIDDEN.get(key, ""))
    for key, target in _TARGETS.items()
}

_OWNED: Final = (
    "one owner by token and fence; attempts counted across crashes; late owners refused; the result is replayed"
)
_EFFECTS: Final = "side effects outside the store are not undone if a worker dies before it writes the record"
_GUARDED: Final = (f"{_OWNED}; a lease that is renewed while the work runs, and ends when its worker dies", _EFFECTS)
_VERBS: Final = (
    f"{_OWNED}; a lease that ends when its worker dies",
    f"leases are not renewed automatically; {_EFFECTS}",
)
_BY_HAND: Final = (
    "the first caller wins",
    "a crash blocks the key until it expires; a late writer overwrites; results are not replayed, and failures "
    "are not recorded",
)
_NO_GUARD: Final = "two coalesced requests, and nothing else of a guard"
_KEY_TOGETHER: Final = (
    "row and key commit together; the first caller wins",
    "no lease, no attempts, no check of the payload, no expiry; results are not replayed",
)
_TOGETHER: Final = "row and record commit together: exactly once at any crash point; the result is replayed"
_CROSSING: Final = "does not cover side effects outside this database"
_UNGUARDED: Final = "duplicates are not detected"

_GUARANTEES: Final[Mapping[str, tuple[str, str]]] = {
    "integr8s_idem": _GUARDED,
    "raw": _BY_HAND,
    "requests": ("the first caller wins", _NO_GUARD),
    "parts": (
        "the first caller wins; the result is replayed",
        "key, token, result and two coalesced requests, and nothing else of a guard",
    ),
    "idemkit": (
        "claims by token in Lua; the lease is renewed while the function runs; the result is replayed",
        "no fence, no attempts counted for functions; one round trip per claim and per completion",
    ),
    "idempotency_kit": (
        "`SET NX`, renewed while the action runs; the result is replayed",
        "no token, so a late writer overwrites; by default, runs the action unprotected when the store fails; "
        "no attempts counted",
    ),
    "verbs": _VERBS,
    "manager_batch": _VERBS,
    "raw_pipeline": _BY_HAND,
    "keys_2m": _VERBS,
    "keys_10k": _VERBS,
    "idempotent": (
        f"{_GUARDED[0]}; offsets are committed after the outcome is recorded; retries, dead letters",
        _EFFECTS,
    ),
    "by_partition": (
        "as `idempotent`, and in order within each partition: each handler starts when the outcome of "
        "the previous one is recorded",
        _EFFECTS,
    ),
    "by_key": ("as `by_partition`, in order within each key", _EFFECTS),
    "one_partition": ("as `by_partition`", _EFFECTS),
    "small_requests": ("as `idempotent`", _EFFECTS),
    "one_process": ("as `idempotent`, with metrics for every event", _EFFECTS),
    "two_processes": ("as `one_process`; a process that dies is started again", _EFFECTS),
    "with_telemetry": ("as `idempotent`, with metrics for every event and spans for every tenth", _EFFECTS),
    "with_spans_of_sdk": (
        "as `idempotent`; the OpenTelemetry SDK makes the spans of every tenth event",
        _EFFECTS,
    ),
    "plain": ("offsets are committed after the handler has finished; retries, dead letters", _UNGUARDED),
    "plain_by_hand": (f"as `plain`; {_BY_HAND[0]}", _BY_HAND[1]),
    "plain_with_requests": ("as `plain`; the first caller wins", _NO_GUARD),
    "endpoint_with_requests": ("the first caller wins", _NO_GUARD),
    "raw_loop": (
        "in order; offsets are committed after each poll",
        _UNGUARDED + "; a failing handler ends the loop",
    ),
    "faststream_ack_first": (
        "in order",
        "a timer commits fetched messages, handled or not: a crash loses messages; " + _UNGUARDED,
    ),
    "faststream_ack": ("in order; each message is committed after its handler, even if it failed", _UNGUARDED),
    "faststream_guarded": (
        f"{_GUARDED[0]}; in order; each message is committed after its outcome is recorded, and redelivered after a "
        "failure",
        _EFFECTS,
    ),
    "faststream_nack": ("in order; each message is committed after its handler, or redelivered", _UNGUARDED),
    "guarded_endpoint": _GUARDED,
    "endpoint": ("none", _UNGUARDED),
    "endpoint_by_hand": _BY_HAND,
    "guarded_core": (_TOGETHER, _CROSSING),
    "guarded_session": (_TOGETHER, _CROSSING),
    "handler": (f"{_TOGETHER}; attempts counted, outgoing events committed with it", _CROSSING),
    "bare": ("the row is committed", _UNGUARDED),
    "by_hand": _KEY_TOGETHER,
    "core": ("the row is committed", _UNGUARDED),
    "core_with_statements": _KEY_TOGETHER,
    "core_with_store": (
        "row and record commit together; one owner by token and fence; a failed run is undone",
        "no attempts, no check of the payload; results are not replayed",
    ),
    "session": ("the row is committed", _UNGUARDED),
    "powertools_sync": (
        "`SET NX` with an expiry for crashed runs; the result is replayed",
        "synchronous; no token, so a late writer overwrites; no renewal; a concurrent duplicate is an error",
    ),
}

GUARANTEES: Final[Mapping[str, tuple[str, str]]] = {
    **_GUARANTEES,
    **{
        f"{name}_native": (f"as `{name}`; uses the native code", _GUARANTEES[name][1])
        for name in ("integr8s_idem", "idempotent", "by_partition", "plain", "guarded_endpoint")
    },
}
"""By contestant: what it guarantees, and its limitations."""
