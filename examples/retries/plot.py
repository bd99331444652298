"""Draw the measurements as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from examples.retries.measurement import Measurement

Points = Sequence[tuple[float, float]]

WIDTH: Final = 640
HEIGHT: Final = 180
"""Of each of the two diagrams, in pixels."""
LEFT: Final = 56
TOP: Final = 34
COLOURS: Final = {"block": "#d1495b", "overtake": "#2a7f9e"}
TITLES: Final = {"block": "block: later events wait", "overtake": "overtake: retry topics"}


def svg(measurements: Sequence[Measurement]) -> str:
    """Return a picture of throughput and lag, one line for each measurement."""
    end = max(each.samples[-1].seconds for each in measurements)
    total = 2 * (HEIGHT + TOP) + 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img" '
        'aria-label="Throughput and lag with both kinds of retries" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{total}" fill="white"/>',
        *_diagram(measurements, lambda each: each.throughput, "orders charged per second", TOP, end),
        *_diagram(measurements, lambda each: each.lag, "orders that wait", 2 * TOP + HEIGHT, end),
        *_legend(measurements, total - 16),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _diagram(
    measurements: Sequence[Measurement], points_of: Callable[[Measurement], Points], title: str, top: int, end: float
) -> Iterator[str]:
    highest = max(1.0, *(value for each in measurements for _, value in points_of(each)))
    right, bottom = WIDTH - 16, top + HEIGHT
    yield f'<text x="{LEFT}" y="{top - 10}" font-weight="bold">{title}</text>'
    yield f'<path d="M{LEFT},{top} V{bottom} H{right}" fill="none" stroke="#888"/>'
    yield f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{highest:.0f}</text>'
    yield f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">0</text>'
    yield f'<text x="{right}" y="{bottom + 15}" text-anchor="end">{end:.0f} s</text>'
    for each in measurements:
        path = " ".join(
            f"{LEFT + seconds / end * (right - LEFT):.1f},{bottom - value / highest * HEIGHT:.1f}"
            for seconds, value in points_of(each)
        )
        yield f'<polyline points="{path}" fill="none" stroke="{COLOURS[each.retries]}" stroke-width="1.5"/>'


def _legend(measurements: Sequence[Measurement], y: int) -> Iterator[str]:
    for place, each in enumerate(measurements):
        x = LEFT + 240 * place
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[each.retries]}"/>'
        yield f'<text x="{x + 18}" y="{y}">{TITLES[each.retries]}</text>'
