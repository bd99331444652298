"""Write the results into the pages, between their markers: `python -m benchmarks.tables`."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.cost_tables import cost_tables
from benchmarks.markdown import Results
from benchmarks.markdown import number as _number
from benchmarks.markdown import table as _table
from benchmarks.markdown import time as _time
from benchmarks.measuring import MODES
from benchmarks.servers import KINDS
from benchmarks.targets import GUARANTEES, RATIOS, TARGETS

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "stores.json"
LATEST: Final = ROOT / "benchmarks" / "results" / "latest.json"
OTHER: Final = ROOT / "benchmarks" / "results" / "other-machine.json"
"""The figures of another machine, whose ratios differ."""
PAGES: Final = (
    ROOT / "docs" / "reference" / "stores.md",
    ROOT / "docs" / "explanation" / "comparison.md",
    ROOT / "docs" / "explanation" / "speed.md",
    ROOT / "docs" / "how-to" / "size-a-deployment.md",
    ROOT / "benchmarks" / "README.md",
)


PEERS: Final = (
    "vs_idemkit_fresh_c64",
    "vs_idempotency_kit_fresh_c64",
    "kafka_vs_faststream",
    "kafka_vs_faststream_ack",
    "kafka_vs_raw_loop",
    "sql_inbox_by_hand",
)
"""Figures whose partner is an alternative to this library."""


def tables(results: Results) -> dict[str, str]:
    """Format the results of the stores, by the names of their markers."""
    kinds = [kind for kind in KINDS if f"{kind}.server" in results]
    return {
        "ratios": _table(
            ["store", "one at a time", "64 at once", "batches of 100", "64 at once, by the manager"],
            [[f"`{kind}`", *(_ratio_and_rate(results, f"{kind}.store.{mode}") for mode in MODES),
              _ratio_and_rate(results, f"{kind}.manager.many")] for kind in kinds],
        ),
        "bare": _table(
            ["driver alone", "one at a time", "64 at once", "batches of 100"],
            [[f"`{kind}`", *(_rate(results, f"{kind}.bare.{mode}") for mode in MODES)] for kind in kinds
             if f"{kind}.bare.one.rate.median" in results],
        ),
        "core": _table(
            ["SQLAlchemy Core on the store's engine", "one at a time", "64 at once", "batches of 100"],
            [[f"`{kind}`", *(_ratio_and_rate(results, f"{kind}.core.{mode}") for mode in MODES)] for kind in kinds
             if f"{kind}.core.one.rate.median" in results],
        ),
        "purge": _table(
            ["store", "rows", "seconds", "rate during the purge ÷ rate before"],
            [[f"`{kind}`", f"{results[f'{kind}.purge.rows']:,}".replace(",", " "),
              _spread(results, f"{kind}.purge.seconds"), _spread(results, f"{kind}.purge.ratio")]
             for kind in kinds if f"{kind}.purge.rows" in results],
        ),
        "servers": _table(
            ["store", "server", "rounds", "seconds per turn", "load before"],
            [[f"`{kind}`", results[f"{kind}.server"], results[f"{kind}.rounds"], results[f"{kind}.seconds"],
              results[f"{kind}.load_before"]]
             for kind in kinds],
        ),
        "machine": _machine(results),
    }  # fmt: skip


def latest_tables(results: Results, other: Results) -> dict[str, str]:
    """Format the figures and their contestants, by the names of their markers.

    `other`: the figures of another machine.
    """
    meanings = {**RATIOS, **{key: target.meaning for key, target in TARGETS.items()}}
    return {
        "figures": _table(
            ["figure", "meaning", "target", "measured", "elsewhere", "by CPU", "this library", "partner"],
            [[f"`{key}`", target.meaning, target, _latest(results, key), _optional(other, key), *_costs(results, key)]
             for key, target in TARGETS.items() if key in results]
            + [[f"`{key}`", meaning, "", _spread_of(results, key), _optional(other, key), *_costs(results, key)]
               for key, meaning in RATIOS.items() if key in results],
            text_columns=2,
        ) + _limits(results),
        "peers": _table(
            ["figure", "meaning", "measured", "by CPU"],
            [[f"`{key}`", meanings[key], _spread_of(results, key), _optional(results, f"{key}.cpu_ratio")]
             for key in PEERS if key in results and key in meanings],
            text_columns=2,
        ),
        "contestants": _table(
            ["contestant", "time per event, by comparison", "guarantees", "limitations"],
            [[f"`{name}`", taken, *promises] for name, promises in GUARANTEES.items()
             if (taken := _times_by_contest(results, name))],
            text_columns=4,
        ),
        "figures-machine": _machine(results),
        "other-machine": _other_machine(other),
        "figures-servers": _table(
            ["benchmark", "server", "rounds", "seconds per turn", "measured at", "commit"],
            [[f"`{name}.py`", *(results.get(f"{name}.{what}", "") for what in
              ("server", "rounds", "turn_seconds", "measured_at", "commit"))] for name in _benchmarks(results)],
            text_columns=2,
        ),
    }  # fmt: skip


def missed(results: Results) -> list[str]:
    """Return the keys of figures that miss their targets, without targets that were dropped."""
    return [
        key
        for key, target in TARGETS.items()
        if key in results and not target.forbidden and not target.reached(results[key])
    ]


def _limits(results: Results) -> str:
    """List the targets that are missed or were dropped, with the reasons."""
    limits = [f"- `{key}`, {TARGETS[key]}: {TARGETS[key].limit}" for key in missed(results) if TARGETS[key].limit]
    dropped = [
        f"- `{key}`, was {target.bound:g}: {target.forbidden}"
        for key, target in TARGETS.items()
        if key in results and target.forbidden
    ]
    return _list("Missed targets, and why:", limits) + _list("Targets that a measured limit forbids:", dropped)


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join(["", "", title, "", *lines]) if lines else ""


def _benchmarks(results: Results) -> list[str]:
    """Return the benchmarks that have results."""
    return [name.partition(".")[0] for name in results if name.endswith(".turn_seconds")]


def _times_by_contest(results: Results, contestant: str) -> str:
    """Format the time per event in each comparison, with its CPU time in brackets."""
    found = []
    for key, value in results.items():
        match key.split("."):
            case ["contest", contest, name, "us"] if name == contestant:
                found.append(f"`{contest}` {_time(value)} ({_time(results[f'contest.{contest}.{name}.cpu_us'])})")
    return "; ".join(found)


def _costs(results: Results, key: str) -> list[str]:
    times = [_duration(results, f"{key}.{whose}") for whose in ("us", "partner_us")]
    return [_optional(results, f"{key}.cpu_ratio"), *times]


def _latest(results: Results, key: str) -> str:
    target, value = TARGETS[key], results[key]
    if target.forbidden or target.reached(value):
        mark = ""
    elif target.reached(value, margin=target.margin):
        mark = " ≈"
    else:
        mark = " †" if target.limit else " ✗"
    return _spread_of(results, key) + mark


def _spread_of(results: Results, key: str) -> str:
    return f"**{_number(results[key])}** ({_number(results[f'{key}.min'])}..{_number(results[f'{key}.max'])})"


def _duration(results: Results, name: str) -> str:
    return _time(results[name]) if name in results else ""


def _optional(results: Results, name: str) -> str:
    return _number(results[name]) if name in results else ""


def _machine(results: Results) -> str:
    versions = [
        f"{name.removeprefix('version.')} {value}" for name, value in results.items() if name.startswith("version.")
    ]
    return (
        f"{results['machine.cpus']} CPUs ({results['machine.cpu']}), {results['machine.system']}, Python "
        f"{results['machine.python']}; {', '.join(versions)}."
    )


def _other_machine(results: Results) -> str:
    servers = sorted({results[f"{name}.server"] for name in ("kafka", "transactions")})
    first = min(value for name, value in results.items() if name.endswith(".measured_at"))
    commits = sorted({str(value) for name, value in results.items() if name.endswith(".commit")})
    return f"{_machine(results)} {'; '.join(servers)}. Measured from {first[:10]} on, at commit {', '.join(commits)}."


def all_tables() -> dict[str, str]:
    """Format all committed results."""
    stores, latest, other = (json.loads(file.read_text(encoding="utf-8")) for file in (RESULTS, LATEST, OTHER))
    return {**tables(stores), **latest_tables(latest, other), **cost_tables(latest)}


def filled(page: str, tables: Mapping[str, str]) -> str:
    """Replace the text between `<!-- NAME -->` and `<!-- end -->` in `page` with the table of that name."""
    for name, table in tables.items():
        head, marker, rest = page.partition(f"<!-- {name} -->\n")
        if marker:
            _, end, tail = rest.partition("<!-- end -->")
            page = f"{head}{marker}\n{table}\n\n{end}{tail}"
    return page


def _ratio_and_rate(results: Results, name: str) -> str:
    """Format a ratio with its spread, and the rate."""
    return f"{_spread(results, f'{name}.ratio')} {_rate(results, name)}".strip()


def _spread(results: Results, name: str) -> str:
    if f"{name}.median" not in results:
        return ""
    middle, minimum, maximum = (_number(results[f"{name}.{which}"]) for which in ("median", "min", "max"))
    return f"**{middle}** ({minimum}..{maximum})"


def _rate(results: Results, name: str) -> str:
    rounded = float(f"{results[f'{name}.rate.median']:.2g}")
    return f"{rounded:,.0f}/s".replace(",", " ")


def main() -> None:
    ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args()
    tables = all_tables()
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
