"""Why a figure may miss its target, where that is known: what would have to be another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LIMITS: Final[Mapping[str, str]] = {
    "single_fresh_c1": (
        "a lone caller waits for all of it: a third of the difference is this process's CPU (lease, token, two "
        "requests, two verdicts), a quarter is Redis, which runs each of the two scripts some 20 µs longer than a "
        "`SET`, and the rest is in neither: two processes that wake each other on two cores"
    ),
    "single_fresh_c64": (
        "this process is the limit: a call has a lease, a fence, a token and a result, and the frames of some "
        "thirty functions"
    ),
    "single_duplicate_c1": (
        "a lone caller waits for all of it: half of the difference is this process's CPU, since the result is read "
        "and replayed, which a losing `SET NX` does not do, and a quarter is Redis, which runs the script some 20 µs "
        "longer than a `SET`"
    ),
    "single_duplicate_c64": (
        "this process is the limit: most of a call is not the store's; a memory of one's own (`local_duplicate`) "
        "saves the rest"
    ),
    "batch500_fresh": (
        "Redis is the limit: two scripts take 11 µs a key of its processor, and each `SET` is written to the "
        "append-only file; by CPU of this process it is beyond the target"
    ),
    "kafka_noop": (
        "both are bound by this process. Key and fingerprint, request, lease, attempt, two answers are as much "
        "work as all that the plain service does for an event that nobody handles"
    ),
    "kafka_1ms": (
        "both are bound by this process, and not by the millisecond: 64 handlers of 1 ms could take an event each "
        "16 µs, which the plain service does not come to either"
    ),
    "kafka_vs_raw_loop": (
        "the loop is little but aiokafka's and pydantic's C. Whatever settles events out of order, in slots, with "
        "retries, takes several times as long in Python, guarded or not: the plain service is at a quarter of it"
    ),
    "kafka_vs_faststream": (
        "`ACK_FIRST` promises less than any other way and does nothing for it: one handler after the other, "
        "offsets by a timer. The guard alone, of an event, takes half of what FastStream takes in all"
    ),
    "kafka_vs_faststream_ack": (
        "bound by this process on one side, by the broker's answer to each commit on the other: it says as much "
        "about the broker as about us"
    ),
    "telemetry_on": (
        "a recorded trace has four spans, which take the SDK and its batch processor some 50 µs each, and its "
        "event leaves the wave for them, which takes another 35; metrics are a tenth of an event's cost"
    ),
    "growth_2m": "a larger table misses the processor's caches more often",
    "sql_inbox": (
        "SQLAlchemy without a guard is at a third of the bare driver already, and the bare driver with an inbox "
        "by hand, which promises less, just below the target: `sql_inbox_core` and `sql_inbox_session` say what "
        "the guard costs beside its own library"
    ),
    "latency_p99_ratio": (
        "as `single_fresh_c1`: more CPU of this process and of Redis, each a longer time in which another process "
        "of the machine may come between"
    ),
}
"""By the key of the figure."""
