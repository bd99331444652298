"""A flame graph as plain SVG: no script, no line numbers, nothing of the machine.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from xml.sax.saxutils import escape

Stack: TypeAlias = tuple[str, ...]
"""Frames from the event loop inwards, each `function (file)`."""

WIDTH: Final = 1600
ROW: Final = 17
HEAD: Final = 64
LEAST: Final = 0.002
"""Share of the whole below which a frame is not drawn: it would be narrower than a letter."""
LETTER: Final = 6.3
"""Width of one, in pixels."""

ROOMS: Final[Mapping[str, tuple[str, str]]] = {
    "integr8s_idem/worker": ("worker: polls, waves, offsets", "#f4a259"),
    "integr8s_idem/stores": ("store", "#e26d5c"),
    "integr8s_idem/events": ("decoding", "#8cb369"),
    "integr8s_idem/envelopes": ("decoding", "#8cb369"),
    "integr8s_idem/keys": ("keys, fingerprints", "#5b8e7d"),
    "integr8s_idem": ("runs, leases, verdicts", "#f4e285"),
    "aiokafka": ("aiokafka", "#9db4d0"),
    "redis": ("redis-py", "#c9a0c4"),
    "pydantic": ("pydantic", "#a7c4a0"),
    "": ("everything else", "#d5d5d5"),
}
"""By the beginning of the file, the first that fits: what it is, and its color."""


@dataclass
class Frame:
    """A function as called from one place, and what it calls."""

    samples: int = 0
    inner: dict[str, Frame] = field(default_factory=dict)


def tree(stacks: Counter[Stack]) -> Frame:
    """All stacks, with what they begin with in common once."""
    root = Frame()
    for stack, number in stacks.items():
        frame = root
        frame.samples += number
        for name in stack:
            frame = frame.inner.setdefault(name, Frame())
            frame.samples += number
    return root


def flame_graph(title: str, stacks: Counter[Stack]) -> str:
    """Callers above what they call; the widest first."""
    root = tree(stacks)
    boxes = list(_boxes(root, root.samples, 0.0, 0))
    height = HEAD + ROW * (1 + max(row for _, row in boxes))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="monospace" '
            'font-size="10.5">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            f'<text x="6" y="18" font-size="14">{escape(title)}</text>',
            *_legend(),
            *(box for box, _ in boxes),
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    place = 6.0
    for name, colour in dict.fromkeys(ROOMS.values()):
        yield f'<rect x="{place:.0f}" y="30" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{place + 16:.0f}" y="40">{escape(name)}</text>'
        place += 16 + LETTER * len(name) + 18


def _boxes(frame: Frame, whole: int, left: float, row: int) -> Iterator[tuple[str, int]]:
    for name, inner in sorted(frame.inner.items(), key=lambda item: (-item[1].samples, item[0])):
        width = inner.samples / whole * WIDTH
        if inner.samples >= whole * LEAST:
            yield _box(name, inner.samples / whole, left, width, row), row
            yield from _boxes(inner, whole, left, row + 1)
        left += width


def _box(name: str, share: float, left: float, width: float, row: int) -> str:
    top = HEAD + row * ROW
    _, colour = next(room for start, room in ROOMS.items() if name.partition(" (")[2].startswith(start))
    fits = int((width - 4) / LETTER)
    short = name.partition(" (")[0]
    text = f'<text x="{left + 2:.1f}" y="{top + 12}">{escape(short[:fits])}</text>' if fits > 2 else ""
    return (
        f'<g><title>{escape(name)} {share:.1%}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{ROW - 1}" fill="{colour}" stroke="#ffffff" stroke-width="0.5"/>{text}</g>'
    )
