"""A flame graph as plain SVG, without scripts, line numbers and local paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias
from xml.sax.saxutils import escape

Stack: TypeAlias = tuple[str, ...]
"""Frames, the outermost first, each `function (file)`."""

WIDTH: Final = 1600
ROW: Final = 17
HEAD: Final = 64
MIN_SHARE: Final = 0.002
"""Share of all samples below which a frame is not drawn, since it would be narrower than a character."""
CHARACTER: Final = 6.3
"""Width of a character, in pixels."""

AREAS: Final[Mapping[str, tuple[str, str]]] = {
    "integr8s_idem/worker": ("worker: polls, batches, offsets", "#f4a259"),
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
"""Label and color by the prefix of the file; the first match applies."""


@dataclass
class Frame:
    """A function as called from one place, with its callees."""

    samples: int = 0
    inner: dict[str, Frame] = field(default_factory=dict)


def tree(stacks: Counter[Stack]) -> Frame:
    """Merge stacks into a tree of frames."""
    root = Frame()
    for stack, number in stacks.items():
        frame = root
        frame.samples += number
        for name in stack:
            frame = frame.inner.setdefault(name, Frame())
            frame.samples += number
    return root


def flame_graph(title: str, stacks: Counter[Stack]) -> str:
    """Draw the graph, with callers above their callees, and the widest frames first."""
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
    x = 6.0
    for name, color in dict.fromkeys(AREAS.values()):
        yield f'<rect x="{x:.0f}" y="30" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{x + 16:.0f}" y="40">{escape(name)}</text>'
        x += 16 + CHARACTER * len(name) + 18


def _boxes(frame: Frame, whole: int, left: float, row: int) -> Iterator[tuple[str, int]]:
    for name, inner in sorted(frame.inner.items(), key=lambda item: (-item[1].samples, item[0])):
        width = inner.samples / whole * WIDTH
        if inner.samples >= whole * MIN_SHARE:
            yield _box(name, inner.samples / whole, left, width, row), row
            yield from _boxes(inner, whole, left, row + 1)
        left += width


def _box(name: str, share: float, left: float, width: float, row: int) -> str:
    top = HEAD + row * ROW
    _, color = next(area for start, area in AREAS.items() if name.partition(" (")[2].startswith(start))
    characters = int((width - 4) / CHARACTER)
    short = name.partition(" (")[0]
    label = short if len(short) <= characters else f"{short[: characters - 1]}…"
    text = f'<text x="{left + 2:.1f}" y="{top + 12}">{escape(label)}</text>' if characters > 2 else ""
    return (
        f'<g><title>{escape(name)} {share:.1%}</title><rect x="{left:.1f}" y="{top}" width="{width:.1f}" '
        f'height="{ROW - 1}" fill="{color}" stroke="#ffffff" stroke-width="0.5"/>{text}</g>'
    )
