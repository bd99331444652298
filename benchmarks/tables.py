"""Write what was measured into the pages, between their marks: `python -m benchmarks.tables`."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.cost_tables import cost_tables
from benchmarks.markdown import Told
from benchmarks.markdown import number as _number
from benchmarks.markdown import table as _table
from benchmarks.markdown import time as _time
from benchmarks.measuring import MODES
from benchmarks.servers import KINDS
from benchmarks.targets import GUARANTEES, RATIOS, TARGETS

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "stores.json"
LATEST: Final = ROOT / "benchmarks" / "results" / "latest.json"
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
"""Figures whose partner is what people would use instead."""


def tables(told: Told) -> dict[str, str]:
    """By the name of their marks."""
    kinds = [kind for kind in KINDS if f"{kind}.server" in told]
    return {
        "ratios": _table(
            ["store", "one at a time", "64 at once", "batches of 100", "64 at once by the manager"],
            [[f"`{kind}`", *(_compared(told, f"{kind}.store.{mode}") for mode in MODES),
              _compared(told, f"{kind}.manager.many")] for kind in kinds],
        ),
        "bare": _table(
            ["driver alone", "one at a time", "64 at once", "batches of 100"],
            [[f"`{kind}`", *(_rate(told, f"{kind}.bare.{mode}") for mode in MODES)] for kind in kinds
             if f"{kind}.bare.one.rate.median" in told],
        ),
        "core": _table(
            ["SQLAlchemy Core on the store's engine", "one at a time", "64 at once", "batches of 100"],
            [[f"`{kind}`", *(_compared(told, f"{kind}.core.{mode}") for mode in MODES)] for kind in kinds
             if f"{kind}.core.one.rate.median" in told],
        ),
        "purge": _table(
            ["store", "rows", "seconds", "rate beside it, to the rate without"],
            [[f"`{kind}`", f"{told[f'{kind}.purge.rows']:,}".replace(",", " "), _spread(told, f"{kind}.purge.seconds"),
              _spread(told, f"{kind}.purge.ratio")] for kind in kinds if f"{kind}.purge.rows" in told],
        ),
        "servers": _table(
            ["store", "server", "rounds", "seconds of a turn", "load of the machine before"],
            [[f"`{kind}`", told[f"{kind}.server"], told[f"{kind}.rounds"], told[f"{kind}.seconds"],
              told[f"{kind}.load_before"]]
             for kind in kinds],
        ),
        "machine": _machine(told),
    }  # fmt: skip


def latest_tables(told: Told) -> dict[str, str]:
    """The same for the figures and whoever takes part in them."""
    meanings = {**RATIOS, **{key: target.meaning for key, target in TARGETS.items()}}
    return {
        "figures": _table(
            ["figure", "is", "at least", "measured", "by CPU", "ours", "partner"],
            [[f"`{key}`", target.meaning, target, _latest(told, key), _plain(told, f"{key}.cpu_ratio"),
              _micros(told, f"{key}.us"), _micros(told, f"{key}.partner_us")]
             for key, target in TARGETS.items() if key in told]
            + [[f"`{key}`", meaning, "", _spread_of(told, key), _plain(told, f"{key}.cpu_ratio"),
                _micros(told, f"{key}.us"), _micros(told, f"{key}.partner_us")]
               for key, meaning in RATIOS.items() if key in told],
            words=2,
        ) + _limits(told),
        "peers": _table(
            ["ours ÷ theirs", "is", "measured", "by CPU"],
            [[f"`{key}`", meanings[key], _spread_of(told, key), _plain(told, f"{key}.cpu_ratio")]
             for key in PEERS if key in told and key in meanings],
            words=2,
        ),
        "contestants": _table(
            ["contestant", "takes for an event, by contest", "guarantees", "does not"],
            [[f"`{name}`", taken, *promises] for name, promises in GUARANTEES.items()
             if (taken := _everywhere(told, name))],
            words=4,
        ),
        "figures-machine": _machine(told),
        "figures-servers": _table(
            ["question", "server", "rounds", "seconds of a turn", "measured at"],
            [[f"`{name}.py`", *(told.get(f"{name}.{what}", "") for what in
              ("server", "rounds", "turn_seconds", "measured_at"))] for name in _questions(told)],
            words=2,
        ),
    }  # fmt: skip


def missed(told: Told) -> list[str]:
    """The keys of figures that do not reach their targets."""
    return [key for key, target in TARGETS.items() if key in told and not target.reached(told[key])]


def _limits(told: Told) -> str:
    """Why targets are missed, where it is known."""
    limits = [f"- `{key}`: {TARGETS[key].limit}" for key in missed(told) if TARGETS[key].limit]
    return "".join(["\n\n", "\n".join(limits)]) if limits else ""


def _questions(told: Told) -> list[str]:
    """Whose answers are there."""
    return [name.partition(".")[0] for name in told if name.endswith(".turn_seconds")]


def _everywhere(told: Told, contestant: str) -> str:
    """What it took in each contest, and in brackets the CPU of that."""
    found = []
    for name, value in told.items():
        match name.split("."):
            case ["contest", contest, who, "us"] if who == contestant:
                found.append(f"`{contest}` {_time(value)} ({_time(told[f'contest.{contest}.{who}.cpu_us'])})")
    return "; ".join(found)


def _latest(told: Told, key: str) -> str:
    return _spread_of(told, key) + ("" if TARGETS[key].reached(told[key]) else " ✗")


def _spread_of(told: Told, key: str) -> str:
    return f"**{_number(told[key])}** ({_number(told[f'{key}.min'])}..{_number(told[f'{key}.max'])})"


def _micros(told: Told, name: str) -> str:
    return _time(told[name]) if name in told else ""


def _plain(told: Told, name: str) -> str:
    return _number(told[name]) if name in told else ""


def _machine(told: Told) -> str:
    versions = [
        f"{name.removeprefix('version.')} {value}" for name, value in told.items() if name.startswith("version.")
    ]
    return (
        f"{told['machine.cpus']} CPUs ({told['machine.cpu']}), {told['machine.system']}, Python "
        f"{told['machine.python']}; {', '.join(versions)}."
    )


def all_tables() -> dict[str, str]:
    """Of all results that are committed."""
    stores, latest = (json.loads(file.read_text(encoding="utf-8")) for file in (RESULTS, LATEST))
    return {**tables(stores), **latest_tables(latest), **cost_tables(latest)}


def filled(page: str, tables: Mapping[str, str]) -> str:
    """`page` with what stands between `<!-- NAME -->` and `<!-- end -->` replaced."""
    for name, table in tables.items():
        head, mark, rest = page.partition(f"<!-- {name} -->\n")
        if mark:
            _, end, tail = rest.partition("<!-- end -->")
            page = f"{head}{mark}\n{table}\n\n{end}{tail}"
    return page


def _compared(told: Told, name: str) -> str:
    """The ratio with its spread, and the rate beside it."""
    return f"{_spread(told, f'{name}.ratio')} {_rate(told, name)}".strip()


def _spread(told: Told, name: str) -> str:
    if f"{name}.median" not in told:
        return ""
    middle, least, most = (_number(told[f"{name}.{which}"]) for which in ("median", "min", "max"))
    return f"**{middle}** ({least}..{most})"


def _rate(told: Told, name: str) -> str:
    told_rate = float(f"{told[f'{name}.rate.median']:.2g}")
    return f"{told_rate:,.0f}/s".replace(",", " ")


def main() -> None:
    ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args()
    tables = all_tables()
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
