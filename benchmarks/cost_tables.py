"""Tables of costs and deployments, for `docs/explanation/speed.md` and `docs/how-to/size-a-deployment.md`."""

from __future__ import annotations

from math import ceil
from typing import Final

from benchmarks.markdown import Results, number, table

STAGES: Final = {
    "fetch": "parsing fetched bytes into records",
    "decode": "strict JSON, the model, id and type",
    "key": "key and fingerprint, from the event's id",
    "reserve": "building and encoding the request, decoding the verdict",
    "dispatch": "lanes, batches, slots, offsets; lease, attempt, calling the handler",
    "handler": "the no-op itself",
    "settle": "encoding the outcome, decoding the response",
    "commit": "one per second, divided among the events of that second",
    "gc": "Python's garbage collector",
}
VARIANTS: Final = {
    "metrics": "metrics for every event, as by default",
    "telemetry": "metrics for every event, spans for every tenth",
    "scoped": "the Dishka integration, and a handler with a dependency in REQUEST scope",
    "result": "a result of 200 bytes",
    "duplicate": "a duplicate instead of a new event",
    "own_thresholds": "the garbage collector with Python's default thresholds, a run every 700 net allocations",
}
KINDS: Final = {"": "new", "result_": "new, with a result of 200 bytes", "duplicate_": "duplicate"}

EXAMPLE_RATE: Final = 10_000
EXAMPLE_HANDLER_MS: Final = 20
EXAMPLE_TTL: Final = 3_600
EXAMPLE_CONCURRENCY: Final = 64
TIMES: Final = "\N{MULTIPLICATION SIGN}"

UTILIZATION: Final = 0.5
"""Planned utilization of a processor."""


def cost_tables(results: Results) -> dict[str, str]:
    """Format the costs, by the names of their markers."""
    return {
        "costs": _stages(results),
        "cost-variants": table(
            ["variant", "µs difference", "µs per event"],
            [[text, _cost(results, f"{name}_more"), _cost(results, f"{name}_whole")] for name, text in VARIANTS.items()
             if f"cost.{name}_more_us" in results],
        ),
        "cost-servers": table(
            ["event", "worker", "Redis", "Kafka", "bytes to Redis", "bytes from Redis"],
            [
                [text, *(f"{_cost(results, f'{kind}{name}')} µs" for name in ("whole", "redis", "broker")),
                 *(number(results[f"cost.{kind}redis_{way}_bytes"]) for way in ("in", "out"))]
                for kind, text in KINDS.items()
            ],
        ),
        "cost-memory": _memory(results),
        "cost-order": _order(results),
        "frames": _frames(results),
        "sizing-example": _example(results),
        "deployments": _deployments(results),
    }  # fmt: skip


def _cost(results: Results, name: str) -> str:
    """Format the median of a cost, with the minimum and maximum of the rounds."""
    middle, minimum, maximum = (_signed(results[f"cost.{name}_us{which}"]) for which in ("", ".min", ".max"))
    return f"**{middle}** ({minimum}..{maximum})"


def _signed(value: float) -> str:
    return number(value) if value >= 0 else f"-{number(-value)}"


def _stages(results: Results) -> str:
    rows = [[name, text, _cost(results, name), f"{_share(results, name):.0%}"] for name, text in STAGES.items()]
    rows += [
        ["sum", "", _cost(results, "sum"), ""],
        ["whole service", "the same events in a worker", _cost(results, "whole"), ""],
        ["residue", "whole minus sum, round by round", _cost(results, "residue"), ""],
    ]
    return table(["stage", "work", "µs of CPU per event", "share of the sum"], rows, text_columns=2)


def _share(results: Results, name: str) -> float:
    return float(results[f"cost.{name}_us"] / results["cost.sum_us"])


def _order(results: Results) -> str:
    rows = []
    contestants = {
        '`"none"`': "idempotent",
        '`"key"`': "by_key",
        '`"partition"`': "by_partition",
        '`"partition"`, one partition': "one_partition",
    }
    for setting, name in contestants.items():
        contestant = f"contest.kafka_noop.{name}"
        rows.append([setting, *(number(results[f"{contestant}.{which}"]) for which in ("cpu_us", "us"))])
    head = ["`ordering`", "µs of worker CPU per event", "µs per event"]
    return table(head, rows)


def _frames(results: Results) -> str:
    kinds = {
        "": "guarded",
        "by_partition.": 'guarded, `ordering = "partition"`',
        "plain.": "without the guard",
        "by_hand.": "by hand: pydantic, and a task for each event",
    }
    rows = [
        [text, *(_optional(results, f"frames.{kind}{what}") for what in ("calls", "allocations", "bytes_in_flight"))]
        for kind, text in kinds.items()
    ]
    return table(["event", "Python calls", "allocations", "bytes while its handler waits"], rows)


def _optional(results: Results, name: str) -> str:
    return number(results[name]) if name in results else ""


def _memory(results: Results) -> str:
    key, tables = results["cost.key_bytes"], results["cost.table_bytes"]
    rows = [
        [text, f"{results[f'cost.{name}']:.0f}", f"{results[f'cost.{name}'] + tables:.0f}"]
        for name, text in (("record_bytes", "no result"), ("result_record_bytes", "a result of 200 bytes"))
    ]
    return table([f"record, key of {key:.0f} bytes", "`MEMORY USAGE`", "including the server's tables"], rows)


def _example(results: Results) -> str:
    worker, redis = results["cost.telemetry_whole_us"], results["cost.redis_us"]
    bytes_per_record = results["cost.record_bytes"] + results["cost.table_bytes"]
    network = results["cost.redis_in_bytes"] + results["cost.redis_out_bytes"]
    by_cpu = EXAMPLE_RATE * worker / 1e6 / UTILIZATION
    running = EXAMPLE_RATE * EXAMPLE_HANDLER_MS / 1000
    shards = EXAMPLE_RATE * redis / 1e6 / UTILIZATION
    rate = f"{EXAMPLE_RATE:,}".replace(",", " ")
    workers = max(ceil(by_cpu), ceil(running / EXAMPLE_CONCURRENCY))
    rows = [
        ["workers by CPU", f"{rate} {TIMES} {worker:.0f} µs ÷ {UTILIZATION}", f"{by_cpu:.1f} → **{ceil(by_cpu)}**"],
        ["concurrent handlers", f"{rate} {TIMES} {EXAMPLE_HANDLER_MS} ms", f"**{running:.0f}**"],
        ["workers by concurrency", f"{running:.0f} ÷ {EXAMPLE_CONCURRENCY}",
         f"{running / EXAMPLE_CONCURRENCY:.1f} → **{ceil(running / EXAMPLE_CONCURRENCY)}**"],
        ["Redis primaries", f"{rate} {TIMES} {redis:.0f} µs ÷ {UTILIZATION}", f"{shards:.1f} → **{ceil(shards)}**"],
        ["Redis memory of the records", f"{rate} {TIMES} {EXAMPLE_TTL} s {TIMES} {bytes_per_record:.0f} bytes",
         f"**{EXAMPLE_RATE * EXAMPLE_TTL * bytes_per_record / 1e9:.1f} GB**"],
        ["Redis network", f"{rate} {TIMES} {network:.0f} bytes", f"**{EXAMPLE_RATE * network / 1e6:.1f} MB/s**"],
        ["partitions, `ordering = \"none\"` or `\"key\"`", "at least as many as workers", f"**{workers}** or more"],
        ["partitions, `ordering = \"partition\"`", "as many as concurrent handlers", f"**{running:.0f}** or more"],
    ]  # fmt: skip
    return table(["resource", "formula", "result"], rows, text_columns=2)


def _deployments(results: Results) -> str:
    rows = []
    for workers in (1, 2):
        name = f"deployment.{workers}"
        rate = number(results[f"{name}.foretold"])
        rows.append(
            [workers, rate, _spread(results, f"{name}.rate"), _spread(results, f"{name}.ratio"),
             _spread(results, f"{name}.worker_us"), number(results[f"{name}.others"])]
        )  # fmt: skip
    head = ["workers", "predicted events/s", "measured events/s", "measured ÷ predicted", "µs of worker CPU per event"]
    return table([*head, "processors used by other load"], rows)


def _spread(results: Results, name: str) -> str:
    middle, minimum, maximum = (number(results[f"{name}{which}"]) for which in ("", ".min", ".max"))
    return f"**{middle}** ({minimum}..{maximum})"
