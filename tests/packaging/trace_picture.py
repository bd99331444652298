"""Draw `docs/explanation/trace-of-a-request.svg`: the spans of one request through the reference platform, from a run.

`make reference` writes it.  All four services run in a `WorkerHarness`.  A client sends a request for an execution, and
then sends the same message again, as after a lost answer of the broker.  Time is simulated, so the picture has no time
axis: it shows which span caused which, and the order of the steps of a delivery.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from xml.sax.saxutils import escape

from sqlalchemy.ext.asyncio import AsyncConnection

from integr8s_idem import Platform
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.telemetry import conventions
from integr8s_idem.testing import RecordedSpan, WorkerHarness, recorded_spans
from integr8s_idem.testing.span_recorder import SpanRecorder
from providers import platform
from providers.settings import PlatformSettings
from services.database import Database
from services.events import CreatePodCommand, ExecutionRequested
from services.k8s_worker.runner import Run, RunEnd, Runner
from tests.packaging.repository import ROOT, name_of

PICTURE: Final = ROOT / "docs" / "explanation" / "trace-of-a-request.svg"
TITLE: Final = "The trace of a request"
REQUEST: Final = ExecutionRequested(execution_id="e1", script="print()")
SERVICES: Final = ("client", *platform.services)
COLORS: Final[Mapping[str, tuple[str, str, str, str]]] = {
    "client": ("#6b7280", "#f3f4f6", "#9ca3af", "#24272b"),
    "coordinator": ("#1d4ed8", "#e8effd", "#8ab4ff", "#1a2742"),
    "k8s-worker": ("#15803d", "#e5f5ea", "#6fd394", "#16301f"),
    "result-processor": ("#7e22ce", "#f4eafd", "#cfa2f5", "#2e1d40"),
    "saga-orchestrator": ("#b45309", "#fdf1dc", "#f2bd63", "#36280f"),
}
"""Border and background of each service's spans, in light and in dark mode."""

WIDTH: Final = 420
RIGHT: Final = 396
"""Right end of the bars; links are drawn to the right of it."""
LEFT: Final = 8
TOP: Final = 62
INDENT: Final = 9
GAP: Final = 3
LINE: Final = 17
CHARACTER: Final = 6.7
"""Width of a character of a name, in pixels, so that the facts begin behind it."""

_STYLE: Final = """\
    .idem text { fill: var(--ink); font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
    .idem .name { font-weight: 600; }
    .idem .small { font-size: 11px; fill: var(--soft); }
    .idem rect { stroke-width: 1; }
    .idem .link { fill: none; stroke: var(--ink); stroke-width: 1.25; stroke-dasharray: 4 3; }
    .idem marker path { fill: var(--ink); }"""


@dataclass(frozen=True)
class Row:
    """A span of the trace, `depth` levels below the request."""

    depth: int
    span: RecordedSpan

    @property
    def service(self) -> str:
        return str(self.span.attributes[conventions.SERVICE])

    @property
    def facts(self) -> str:
        """Outcome or verdict, attempt, and links to other spans than the parent."""
        return str(self.span).removeprefix(self.span.name).strip(" ()")

    @property
    def has_two_lines(self) -> bool:
        """Whether it is the first span of its service, which names the service."""
        return self.span.kind == "consumer" or not self.depth

    @property
    def height(self) -> int:
        return (2 if self.has_two_lines else 1) * LINE

    def __str__(self) -> str:
        return f"{self.span.name} ({', '.join(filter(None, (self.service, self.facts)))})"


class _Runner:
    """Runs no scripts."""

    async def run(self, pod_name: str, command: CreatePodCommand, stop: asyncio.Event) -> Run:
        return Run(RunEnd.EXITED)

    async def discard(self, pod_name: str) -> None:
        """Do nothing."""


class _OrderedDatabase(Database):
    """Grants transactions in the order of the requests, so that each run has the same trace."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        async with self._turn, super().transaction() as connection:
            yield connection


async def trace_of_a_request(folder: Path) -> list[Row]:
    """Send a request twice to the platform, with its database in `folder`, and return all spans of the trace."""
    url = f"sqlite+aiosqlite:///{folder}/platform.db"
    settings = PlatformSettings.model_validate({"platform": {"database_url": url, "runner": "subprocess"}})
    client = SpanRecorder()
    observer = client.observer("client")
    database = _OrderedDatabase(url)
    await database.open()
    fakes = {Runner: _Runner(), Database: database}
    try:
        async with WorkerHarness(_without_background(), fakes=fakes, settings=settings) as harness:
            headers = event_headers(REQUEST)
            with observer.sending(REQUEST.event_type, REQUEST.event_id):
                observer.inject(headers)
            for _ in range(2):
                harness.put(REQUEST.event_type, encode_event(REQUEST), headers)
                await harness.settled()
            spans = recorded_spans(harness)
    finally:
        await database.close()
    (request,) = client.spans()
    assert {span.trace_id for span in spans} == {request.trace_id}
    request.children += [span for span in spans if span.parent is None]
    return list(_rows(request, 0))


def _without_background() -> Platform:
    """Return the platform without its background tasks, which may publish a command before its handler does."""
    services = [replace(service, background=()) for service in platform.services.values()]
    return Platform(*services, settings=PlatformSettings)


def _rows(span: RecordedSpan, depth: int) -> Iterator[Row]:
    yield Row(depth, span)
    # Deliveries of a message are concurrent, so the order in which they began varies.
    children = sorted(span.children, key=_delivery) if span.name.startswith("send ") else span.children
    for child in children:
        yield from _rows(child, depth + 1)


def _delivery(span: RecordedSpan) -> tuple[int, int]:
    return int(span.attributes[conventions.OFFSET]), SERVICES.index(str(span.attributes[conventions.SERVICE]))


def picture(rows: Sequence[Row]) -> str:
    """Draw one bar for each span, below its parent and further to the right."""
    tops: dict[RecordedSpan, int] = {}
    height = TOP
    for row in rows:
        tops[row.span] = height
        height += row.height + GAP
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="idem" viewBox="0 0 {WIDTH} {height + 4}" role="img" '
            'aria-labelledby="trace-title trace-desc">',
            f'  <title id="trace-title">{TITLE}</title>',
            f'  <desc id="trace-desc">{escape(_description(rows))}</desc>',
            *_style(),
            '  <defs><marker id="trace-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L8 4 L0 8 Z"/></marker></defs>',
            *_legend(),
            *(line for row in rows for line in _bar(row, tops[row.span])),
            *(line for row in rows for line in _links(row, tops)),
            "</svg>\n",
        ]
    )


def _description(rows: Sequence[Row]) -> str:
    listed = "; ".join(f"level {row.depth}: {row}" for row in rows)
    return f"{len(rows)} spans of one trace, each on a level below the span that caused it. {listed}."


def _style() -> Iterator[str]:
    yield "  <style>"
    for dark in (False, True):
        inks = "--ink: #e5e7eb; --soft: #b6bcc6;" if dark else "--ink: #1f2937; --soft: #4b5563;"
        colors = [each[2:] if dark else each[:2] for each in COLORS.values()]
        variables = " ".join(
            f"--edge-{number}: {edge}; --fill-{number}: {fill};" for number, (edge, fill) in enumerate(colors)
        )
        rule = f".idem {{ {inks} {variables} }}"
        yield f"    @media (prefers-color-scheme: dark) {{ {rule} }}" if dark else f"    {rule}"
    yield _STYLE
    for number in range(len(COLORS)):
        yield f"    .idem .s{number} {{ fill: var(--fill-{number}); stroke: var(--edge-{number}); }}"
    yield "  </style>"


def _class(service: str) -> str:
    return f"s{SERVICES.index(service)}"


def _legend() -> Iterator[str]:
    yield f'  <text class="name" x="{LEFT}" y="18">{TITLE}</text>'
    for number, service in enumerate(SERVICES):
        x, y = LEFT + number % 3 * 132, 26 + number // 3 * LINE
        yield f'  <rect class="{_class(service)}" x="{x}" y="{y}" width="12" height="12" rx="3"/>'
        yield f'  <text class="small" x="{x + 17}" y="{y + 10}">{service}</text>'


def _bar(row: Row, top: int) -> Iterator[str]:
    left = LEFT + INDENT * row.depth
    yield f"  <g><title>{escape(str(row))}</title>"
    yield (
        f'    <rect class="{_class(row.service)}" x="{left}" y="{top}" width="{RIGHT - left}" height="{row.height}" '
        'rx="4"/>'
    )
    x, y = left + 6, top + 13
    yield f'    <text class="{"name" if row.has_two_lines else ""}" x="{x}" y="{y}">{escape(row.span.name)}</text>'
    if row.has_two_lines:
        facts, y = f"{row.service}{': ' * bool(row.facts)}{row.facts}", y + 15
    else:
        facts, x = row.facts, x + round(CHARACTER * len(row.span.name)) + 6
    if facts:
        yield f'    <text class="small" x="{x}" y="{y}">{escape(facts)}</text>'
    yield "  </g>"


def _links(row: Row, tops: Mapping[RecordedSpan, int]) -> Iterator[str]:
    """Draw the links of a span, except the one to its parent, which is the producer."""
    start = tops[row.span] + row.height // 2
    for relation, other in row.span.links.items():
        if other in tops and relation != "producer":
            path = f"M{RIGHT} {start} H{WIDTH - 8} V{tops[other] + 2 * LINE // 2} H{RIGHT + 1}"
            yield f'  <path class="link" d="{path}" marker-end="url(#trace-head)"/>'


async def make() -> str:
    """Run the platform and draw the trace."""
    with TemporaryDirectory() as folder:
        return picture(await trace_of_a_request(Path(folder)))


if __name__ == "__main__":
    PICTURE.write_text(asyncio.run(make()), encoding="utf-8")
    print(f"{name_of(PICTURE)} written", file=sys.stderr)
