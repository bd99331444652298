"""What each figure means, what it must come to, and what each contestant promises for its number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.limits import LIMITS


@dataclass(frozen=True)
class Target:
    """Of one figure."""

    meaning: str
    bound: float
    at_most: bool = False
    """Whether less is better."""
    limit: str = ""
    """Where it cannot be reached: why."""
    noise: float = 0.25
    """Part of itself by which two runs of one state may differ."""

    def reached(self, value: float, *, margin: float = 0.0) -> bool:
        """Whether `value` is good enough, or misses it by no more than `margin`, a part of it."""
        return value <= self.bound * (1 + margin) if self.at_most else value >= self.bound * (1 - margin)

    def worse(self, now: float, before: float) -> bool:
        """Whether `now` is more than noise behind `before`."""
        return now > before * (1 + self.noise) if self.at_most else now < before * (1 - self.noise)

    def __str__(self) -> str:
        return f"{'at most ' if self.at_most else ''}{self.bound:g}"


_TARGETS: Final[Mapping[str, Target]] = {
    "single_fresh_c1": Target("`manager.run`, fresh keys, one at a time ÷ raw two calls", 0.9),
    "single_fresh_c64": Target("the same, 64 at once", 3.0),
    "single_duplicate_c1": Target("`manager.run`, duplicates, one at a time ÷ raw losing `SET NX`", 0.9),
    "single_duplicate_c64": Target("the same, 64 at once", 3.0),
    "local_duplicate": Target("duplicates that this process completed ÷ raw losing `SET NX`, one at a time", 20),
    "batch500_fresh": Target("`reserve` and `complete` in batches of 500 ÷ redis-py's pipelines of 500", 2.5),
    "kafka_noop": Target("idempotent service ÷ the same with the plain dispatcher, no-op handler", 0.65),
    "kafka_1ms": Target("the same with a handler that awaits 1 ms, concurrency 64", 0.95),
    "kafka_vs_raw_loop": Target("idempotent service ÷ a bare aiokafka loop", 0.4),
    "kafka_vs_faststream": Target("idempotent service ÷ FastStream's subscriber, `ACK_FIRST`", 2.5),
    "kafka_vs_faststream_ack": Target("idempotent service ÷ FastStream's subscriber, `ACK`", 10),
    "telemetry_on": Target("idempotent service with metrics and spans, 10 % sampled ÷ without", 0.8),
    "redis_bytes_per_key": Target("`MEMORY USAGE` of a completed record without result", 200, at_most=True, noise=0),
    "growth_2m": Target("rate with 2 million keys in the store ÷ rate with 10 thousand", 0.9),
    "sql_inbox": Target("business insert and record in one transaction ÷ the bare business transaction", 0.7),
    "vs_idemkit_fresh_c64": Target("`manager.run` ÷ idemkit, fresh keys, 64 at once", 4.0),
    "vs_idempotency_kit_fresh_c64": Target("`manager.run` ÷ idempotency-kit, fresh keys, 64 at once", 4.0),
    "latency_p99_ratio": Target(
        "p99 of a single guarded call at low load ÷ p99 of raw two calls", 1.3, at_most=True, noise=0.5
    ),
}

RATIOS: Final[Mapping[str, str]] = {
    "sql_inbox_session": "the same by SQLAlchemy's session ÷ the session without a guard",
    "sql_inbox_core": "the same by SQLAlchemy Core ÷ Core without a guard",
    "sql_inbox_by_hand": "the same by SQLAlchemy Core ÷ the bare driver with an inbox by hand",
}
"""Figures without a target, and what they mean: they say where the time of others goes."""

TARGETS: Final[Mapping[str, Target]] = {
    key: replace(target, limit=LIMITS.get(key, "")) for key, target in _TARGETS.items()
}

_OWNED: Final = (
    "one owner by token and fence; attempts counted through crashes; late owners refused; the result replayed"
)
_EFFECTS: Final = "effects outside the store are not undone when a worker dies between effect and record"
_GUARDED: Final = (f"{_OWNED}; a lease that is renewed while the work runs, and ends when its worker dies", _EFFECTS)
_VERBS: Final = (f"{_OWNED}; a lease that ends when its worker dies", f"renews no lease by itself; {_EFFECTS}")
_BY_HAND: Final = (
    "the first wins",
    "a crash blocks the key until it expires; whoever is late overwrites; no result is replayed, no failure remembered",
)
_KEY_TOGETHER: Final = (
    "row and key commit together; the first wins",
    "no lease, no attempts, no check of the payload, no expiry; no result is replayed",
)
_TOGETHER: Final = "row and record commit together: exactly once, whatever crashes; the result replayed"
_CROSSING: Final = "what the handler does outside this database"
_UNGUARDED: Final = "no duplicate is noticed"

GUARANTEES: Final[Mapping[str, tuple[str, str]]] = {
    "ours": _GUARDED,
    "raw": _BY_HAND,
    "idemkit": (
        "claims by token in Lua; lease renewed while the function runs; result replayed",
        "no fence, no attempts counted for functions; one round trip for each claim and each completion",
    ),
    "idempotency_kit": (
        "`SET NX`, renewed while the action runs; result replayed",
        "no token: whoever is late overwrites; runs the action unprotected when the store fails (its default); "
        "no attempts counted",
    ),
    "verbs": _VERBS,
    "manager_batch": _VERBS,
    "raw_pipeline": _BY_HAND,
    "keys_2m": _VERBS,
    "keys_10k": _VERBS,
    "idempotent": (
        f"{_GUARDED[0]}; an offset is committed after the outcome is recorded; retries, dead letters",
        _EFFECTS,
    ),
    "with_telemetry": ("the same, with metrics of every event and spans of every tenth", _EFFECTS),
    "plain": ("an offset is committed after the handler has ended; retries, dead letters", _UNGUARDED),
    "raw_loop": (
        "in order; offsets are committed after each poll",
        _UNGUARDED + "; a handler that fails ends the loop",
    ),
    "faststream_ack_first": (
        "in order",
        "commits by a timer what was fetched, handled or not: a crash loses messages; " + _UNGUARDED,
    ),
    "faststream_ack": ("in order; each message is committed after its handler, failed or not", _UNGUARDED),
    "guarded_core": (_TOGETHER, _CROSSING),
    "guarded_session": (_TOGETHER, _CROSSING),
    "handler": (f"{_TOGETHER}; attempts counted, outgoing events committed with it", _CROSSING),
    "bare": ("the row is committed", _UNGUARDED),
    "by_hand": _KEY_TOGETHER,
    "core": ("the row is committed", _UNGUARDED),
    "session": ("the row is committed", _UNGUARDED),
    "powertools_sync": (
        "`SET NX` with an expiry for runs that died; result replayed",
        "synchronous; no token: whoever is late overwrites; no renewal; a running twin is an error",
    ),
}
"""By the name of a contestant: what it does guarantee, and what it does not."""
