"""Numbers and tables as the pages have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Told: TypeAlias = Mapping[str, Any]
"""Results, by their keys."""


def number(value: float) -> str:
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def time(micros: float) -> str:
    """Of so many microseconds."""
    return f"{micros:.3g} µs" if micros < 999.5 else f"{micros / 1000:.3g} ms"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, words: int = 1) -> str:
    """The first columns hold words, the others numbers."""
    lines = [head, ["---"] * words + ["---:"] * (len(head) - words), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
