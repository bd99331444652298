"""Format numbers and tables for the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Results: TypeAlias = Mapping[str, Any]
"""Results, by key."""


def number(value: float) -> str:
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def time(microseconds: float) -> str:
    """Format a duration in microseconds."""
    return f"{microseconds:.3g} µs" if microseconds < 999.5 else f"{microseconds / 1000:.3g} ms"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]], *, text_columns: int = 1) -> str:
    """Format a table whose first `text_columns` columns hold text, and the others numbers."""
    lines = [head, ["---"] * text_columns + ["---:"] * (len(head) - text_columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
