"""What events cost, and what follows for deployments: for `docs/explanation/speed.md` and the page on sizes."""

from __future__ import annotations

from math import ceil
from typing import Final

from benchmarks.markdown import Told, number, table

STAGES: Final = {
    "fetch": "bytes of a fetch become records",
    "decode": "strict JSON, the model, id and type",
    "key": "key and fingerprint, by the event's id",
    "reserve": "the request, its bytes, the verdict",
    "dispatch": "lanes, waves, slots, offsets; lease, attempt, the call of the handler",
    "handler": "the no-op itself",
    "settle": "the outcome's bytes, the answer",
    "commit": "one a second, shared by the events of that second",
    "gc": "Python's garbage collector",
}
VARIANTS: Final = {
    "telemetry": "metrics of every event, spans of every tenth",
    "scoped": "Dishka's wiring, and a handler that takes something of a REQUEST scope",
    "result": "a result of 200 bytes",
    "duplicate": "a duplicate instead of a new event",
    "own_thresholds": "the garbage collector looking as often as Python lets it, every 700 containers",
}
KINDS: Final = {"": "new", "result_": "new, with a result of 200 bytes", "duplicate_": "duplicate"}

EXAMPLE_RATE: Final = 10_000
EXAMPLE_HANDLER_MS: Final = 20
EXAMPLE_TTL: Final = 3_600
EXAMPLE_CONCURRENCY: Final = 64
TIMES: Final = "\N{MULTIPLICATION SIGN}"

FULL: Final = 0.5
"""Share of a processor that is planned with."""


def cost_tables(told: Told) -> dict[str, str]:
    """By the name of their marks."""
    return {
        "costs": _stages(told),
        "cost-variants": table(
            ["and with", "µs more, or less", "µs an event"],
            [[words, _cost(told, f"{name}_more"), _cost(told, f"{name}_whole")] for name, words in VARIANTS.items()
             if f"cost.{name}_more_us" in told],
        ),
        "cost-servers": table(
            ["event", "worker", "Redis", "Kafka", "bytes to Redis", "bytes from Redis"],
            [
                [words, *(f"{_cost(told, f'{kind}{name}')} µs" for name in ("whole", "redis", "broker")),
                 *(number(told[f"cost.{kind}redis_{way}_bytes"]) for way in ("in", "out"))]
                for kind, words in KINDS.items()
            ],
        ),
        "cost-memory": _memory(told),
        "sizing-example": _example(told),
        "deployments": _deployments(told),
    }  # fmt: skip


def _cost(told: Told, name: str) -> str:
    """The median, and the rounds it is of."""
    middle, least, most = (_signed(told[f"cost.{name}_us{which}"]) for which in ("", ".min", ".max"))
    return f"**{middle}** ({least}..{most})"


def _signed(value: float) -> str:
    return number(value) if value >= 0 else f"-{number(-value)}"


def _stages(told: Told) -> str:
    rows = [[name, words, _cost(told, name), f"{_part(told, name):.0%}"] for name, words in STAGES.items()]
    rows += [
        ["sum", "", _cost(told, "sum"), ""],
        ["whole service", "the same events through a worker", _cost(told, "whole"), ""],
        ["residue", "whole less sum, round by round", _cost(told, "residue"), ""],
    ]
    return table(["stage", "is", "µs of CPU an event", "of the sum"], rows, words=2)


def _part(told: Told, name: str) -> float:
    return float(told[f"cost.{name}_us"] / sum(told[f"cost.{each}_us"] for each in STAGES))


def _memory(told: Told) -> str:
    key, tables = told["cost.key_bytes"], told["cost.table_bytes"]
    rows = [
        [words, f"{told[f'cost.{name}']:.0f}", f"{told[f'cost.{name}'] + tables:.0f}"]
        for name, words in (("record_bytes", "no result"), ("result_record_bytes", "a result of 200 bytes"))
    ]
    return table([f"record, key of {key:.0f} bytes", "`MEMORY USAGE`", "with the server's tables"], rows)


def _example(told: Told) -> str:
    worker, redis = told["cost.telemetry_whole_us"], told["cost.redis_us"]
    kept = told["cost.record_bytes"] + told["cost.table_bytes"]
    network = told["cost.redis_in_bytes"] + told["cost.redis_out_bytes"]
    by_cpu = EXAMPLE_RATE * worker / 1e6 / FULL
    running = EXAMPLE_RATE * EXAMPLE_HANDLER_MS / 1000
    shards = EXAMPLE_RATE * redis / 1e6 / FULL
    rate = f"{EXAMPLE_RATE:,}".replace(",", " ")
    workers = max(ceil(by_cpu), ceil(running / EXAMPLE_CONCURRENCY))
    rows = [
        ["workers by CPU", f"{rate} {TIMES} {worker:.0f} µs ÷ {FULL}", f"{by_cpu:.1f} → **{ceil(by_cpu)}**"],
        ["handlers at once", f"{rate} {TIMES} {EXAMPLE_HANDLER_MS} ms", f"**{running:.0f}**"],
        ["workers by handlers", f"{running:.0f} ÷ {EXAMPLE_CONCURRENCY}",
         f"{running / EXAMPLE_CONCURRENCY:.1f} → **{ceil(running / EXAMPLE_CONCURRENCY)}**"],
        ["Redis primaries", f"{rate} {TIMES} {redis:.0f} µs ÷ {FULL}", f"{shards:.1f} → **{ceil(shards)}**"],
        ["memory of Redis", f"{rate} {TIMES} {EXAMPLE_TTL} s {TIMES} {kept:.0f} bytes",
         f"**{EXAMPLE_RATE * EXAMPLE_TTL * kept / 1e9:.1f} GB**"],
        ["network of Redis", f"{rate} {TIMES} {network:.0f} bytes", f"**{EXAMPLE_RATE * network / 1e6:.1f} MB/s**"],
        ["partitions, `ordering = \"none\"` or `\"key\"`", "at least as many as workers", f"**{workers}** or more"],
        ["partitions, `ordering = \"partition\"`", "as many as handlers at once", f"**{running:.0f}** or more"],
    ]  # fmt: skip
    return table(["what", "formula", "comes to"], rows, words=2)


def _deployments(told: Told) -> str:
    rows = []
    for workers in (1, 2):
        name = f"deployment.{workers}"
        rate = number(told[f"{name}.foretold"])
        rows.append(
            [workers, rate, _spread(told, f"{name}.rate"), _spread(told, f"{name}.ratio"),
             _spread(told, f"{name}.worker_us"), number(told[f"{name}.others"])]
        )  # fmt: skip
    head = ["workers", "foretold", "measured events a second", "measured ÷ foretold", "µs of CPU in workers"]
    return table([*head, "processors taken by others"], rows)


def _spread(told: Told, name: str) -> str:
    middle, least, most = (number(told[f"{name}{which}"]) for which in ("", ".min", ".max"))
    return f"**{middle}** ({least}..{most})"
