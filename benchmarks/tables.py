"""Write what was measured into the pages, between their marks: `python -m benchmarks.tables`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import MODES
from benchmarks.servers import KINDS

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results" / "stores.json"
PAGES: Final = (ROOT / "docs" / "reference" / "stores.md", ROOT / "benchmarks" / "README.md")

Told = Mapping[str, Any]


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
        "machine": f"{told['machine.cpus']} CPUs ({told['machine.cpu']}), {told['machine.system']}, Python "
        f"{told['machine.python']}; " + ", ".join(
            f"{name.removeprefix('version.')} {value}" for name, value in told.items() if name.startswith("version.")
        ) + ".",
    }  # fmt: skip


def filled(page: str, told: Told) -> str:
    """`page` with what stands between `<!-- NAME -->` and `<!-- end -->` replaced."""
    for name, table in tables(told).items():
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


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> None:
    told = json.loads(RESULTS.read_text(encoding="utf-8"))
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), told), encoding="utf-8")


if __name__ == "__main__":
    main()
