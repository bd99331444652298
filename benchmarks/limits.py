"""Known reasons why figures miss their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LIMITS: Final[Mapping[str, str]] = {
    "single_fresh_c1": (
        "a single caller waits for every step. A third of the difference is CPU time of this process (lease, token, "
        "two requests, two verdicts), a quarter is Redis, where each of the two scripts takes some 20 µs longer than "
        "a `SET`, and the rest is the time that two processes on two cores need to wake each other"
    ),
    "single_fresh_c64": (
        "limited by the CPU of this process: a call manages a lease, a fence, a token and a result, in some thirty "
        "function calls"
    ),
    "single_duplicate_c1": (
        "a single caller waits for every step. Half of the difference is CPU time of this process, which reads and "
        "replays the result (a losing `SET NX` does not), and a quarter is Redis, where the script takes some 20 µs "
        "longer than a `SET`"
    ),
    "single_duplicate_c64": (
        "limited by the CPU of this process: most of a call is spent outside the store; the local memory "
        "(`local_duplicate`) saves the rest"
    ),
    "batch500_fresh": (
        "limited by Redis: its two scripts take 11 µs of CPU per key, and each `SET` is written to the append-only "
        "file; by CPU of this process, the figure exceeds its target"
    ),
    "kafka_noop": (
        "both are limited by the CPU of this process. Key and fingerprint, request, lease, attempt and two responses "
        "are as much work as everything that the plain service does for an event with a no-op handler"
    ),
    "kafka_1ms": (
        "both are limited by the CPU of this process, not by the millisecond: 64 handlers of 1 ms could take an "
        "event every 16 µs, which the plain service does not reach either"
    ),
    "kafka_vs_raw_loop": (
        "the loop is little more than C code of aiokafka and pydantic. Settling events out of order, in concurrent "
        "slots, with retries, takes several times as long in Python, guarded or not: the plain service reaches a "
        "quarter of the loop's rate"
    ),
    "kafka_vs_faststream": (
        "`ACK_FIRST` gives the weakest guarantee and does the least work: one handler after the other, offsets "
        "committed by a timer. The guard alone takes half of the time that FastStream takes per event in total"
    ),
    "kafka_vs_faststream_ack": (
        "limited by the CPU of this process on one side, and by the broker's response to each commit on the other: "
        "the figure depends on the broker as much as on this library"
    ),
    "telemetry_on": (
        "a recorded trace has four spans, which cost some 50 µs each in the SDK and its batch processor; its event "
        "is handled outside the batch, which costs another 35 µs. Metrics are a tenth of an event's cost"
    ),
    "growth_2m": "a larger table misses the processor's caches more often",
    "sql_inbox": (
        "SQLAlchemy without a guard reaches only a third of the bare driver's rate, and the bare driver with a "
        "hand-written inbox, which guarantees less, is just below the target. `sql_inbox_core` and "
        "`sql_inbox_session` show what the guard costs on top of SQLAlchemy"
    ),
    "latency_p99_ratio": (
        "as for `single_fresh_c1`, this process and Redis use more CPU time, in which they can be preempted by other "
        "processes of the machine"
    ),
}
"""By the key of the figure."""
