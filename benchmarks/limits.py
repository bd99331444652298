"""Known reasons why figures miss their targets, and targets that were dropped because a measured limit forbids them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Without an entry, a figure that misses its target by more than a tenth makes `make bench` fail.
LIMITS: Final[Mapping[str, str]] = {
    "single_fresh_c1": (
        "a single caller waits for every step. The two requests with key, token and result, without anything else of a "
        "guard, are `single_fresh_c1_parts`: they leave no time for attempt, lease, run and policies. The requests "
        "alone (`single_fresh_c1_requests`) exceed the target by 42% on another machine, which is too little, too"
    ),
    "single_duplicate_c1": (
        "a single caller waits for every step. The request with key, token and result, without anything else of a "
        "guard, is `single_duplicate_c1_parts`: it misses the target, and reaches only 1.1 to 1.2 by CPU. The request "
        "alone (`single_duplicate_c1_requests`) exceeds the target by a third on another machine, which is too little, "
        "too"
    ),
    "single_fresh_c1_native": "as for `single_fresh_c1`",
    "single_duplicate_c1_native": "as for `single_duplicate_c1`",
    "single_duplicate_c64": (
        "limited by the CPU of this process, which makes the key and the request, and reads and replays the result. It "
        "reaches the target on another machine, and with native code on both"
    ),
    "local_duplicate": (
        "limited by the CPU of this process, which looks the key up and replays its result without a system call: on "
        "one machine this takes 6.3 µs, on another 3.3, while redis-py takes 108 and 94 µs"
    ),
    "kafka_noop": (
        "the guarded and the plain service are both limited by the CPU of this process. The two requests, without "
        "anything else of a guard, are `kafka_noop_requests`. With the key (`cost.key_us`), they leave 9 µs on one "
        "machine and 11 on another, of which the lease (`cost.lease_us`) takes 4 and 7; batch, attempt, run and "
        "outcome have to fit into the rest. For the figure with native code, see `kafka_noop_native`; with a handler "
        "that is guarded by hand, with two calls of redis-py, `kafka_by_hand`"
    ),
    "kafka_default_order": (
        "each outcome is recorded before the next handler of its partition starts, so a request to record outcomes "
        "contains at most 8 of them, one per partition, and the next one waits for its response. Such requests alone, "
        "in a service without an order, are `kafka_default_order_requests`: by the clock, they miss the target on one "
        "machine, and exceed it by a tenth on another. By CPU they cost little; the rest is this library's own: it "
        "executes a tenth more instructions than without an order, and each instruction takes longer"
    ),
    "kafka_default_order_native": (
        "as for `kafka_default_order`, while the service without an order takes three quarters of the time"
    ),
    "kafka_1ms": (
        "the guarded and the plain service are both limited by the CPU of this process, not by the millisecond: 64 "
        "handlers of 1 ms could take an event every 16 µs, which the plain service does not reach either. The plain "
        "service with key, lease and the two requests for many events together, and nothing else of a guard "
        "(`python -m benchmarks.instructions waiting_plain waiting_with_parts`), executes 1.31 to 1.42 times as many "
        "instructions, where the target allows 1.33. A handler that makes the two requests itself is "
        "`kafka_1ms_requests`: slower, since the worker makes them for several events together"
    ),
    "kafka_1ms_native": "as for `kafka_1ms`",
    "kafka_vs_faststream": (
        "the time of the partner depends on the machine more than that of this library: 49 µs per event on one, 127 on "
        "another, where the target is reached. On the former, the target allows 33 µs; the plain service with the two "
        "requests, without anything else of a guard, takes 29 (`kafka_noop_requests`), and the key and the lease of an "
        "event 7.6"
    ),
    "kafka_vs_faststream_native": (
        "as for `kafka_vs_faststream`: where the partner takes 49 µs, the target allows 25, which the plain service "
        "with native code and the two requests takes already"
    ),
    "latency_p99_ratio": (
        "one in a hundred calls waits for a pause of the machine or of Redis, as the partner's does, so the figure "
        "varies: three runs on two machines had 1.12, 1.12 and 1.21"
    ),
    "telemetry_on": (
        "spans of the OpenTelemetry SDK for a tenth of the events, made without any code of this library, metrics or "
        "propagation, are `telemetry_bound`: they alone miss the target on one machine, and exceed it by a twentieth "
        "on another. Metrics for every event, propagation and this library's part of the spans take longer than that"
    ),
    "sql_inbox_core": (
        "two bare statements on the same connection, without any guard, are `sql_inbox_statements`: each is a round "
        "trip. They leave a tenth of the time that the target allows. The calls of the store, which also undo a failed "
        "run and refuse a commit within it, are `sql_inbox_store`: without the rest of the guard, they miss the target"
    ),
    "sql_inbox_session": "as for `sql_inbox_core`, with another 20 calls to get the connection from the session",
}
"""By the key of the figure."""

# Decision 90 has the figures.
FORBIDDEN: Final[Mapping[str, str]] = {
    "kafka_vs_raw_loop": (
        "the loop is little more than C code of aiokafka and pydantic. Settling events out of order, in concurrent "
        "slots, with retries, takes several times as long in Python, guarded or not: the plain service, with the two "
        "requests of a batch (`kafka_noop_requests`), leaves less time than the key and the lease of an event take "
        "(`cost.key_us`, `cost.lease_us`)"
    ),
    "kafka_vs_raw_loop_native": (
        "as for `kafka_vs_raw_loop`. Native code takes over decoding, keys and the encoding of requests: the plain "
        "service with native code, and the two requests, leave less time than the lease of an event takes"
    ),
    "http_guarded": (
        "an endpoint that makes the two requests, without anything else of a guard, is `http_requests`: it leaves less "
        "time than half of what `manager.run` takes besides its requests. One that is guarded by hand, with two "
        "calls of redis-py, is `http_by_hand`. FastAPI calls some 155 functions for a request that does nothing, and "
        "the guard another 160"
    ),
    "http_guarded_native": "as for `http_guarded`: native code has no part in headers, fingerprints and responses",
}
"""Why a target was dropped, by the key of the figure: what the figure cannot do without takes too long."""
