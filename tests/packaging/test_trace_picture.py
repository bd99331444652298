"""The picture of a trace shows what the reference platform records."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.packaging import trace_picture
from tests.packaging.trace_picture import COLORS, PICTURE, SERVICES, Row

BAR = re.compile(r'<title>([^<]+)</title>\s*<rect class="s(\d)" x="(\d+)"')


@pytest.fixture
async def rows(tmp_path: Path) -> Sequence[Row]:
    return await trace_picture.trace_of_a_request(tmp_path)


def drawn(picture: str) -> list[tuple[str, str, int]]:
    """Return the text, the service and the level of each bar."""
    level = {trace_picture.LEFT + trace_picture.INDENT * depth: depth for depth in range(30)}
    return [(text, SERVICES[int(number)], level[int(left)]) for text, number, left in BAR.findall(picture)]


async def test_the_picture_shows_the_spans_of_a_run(rows: Sequence[Row]) -> None:
    picture = PICTURE.read_text(encoding="utf-8")

    found = [(text.replace("&gt;", ">"), service, level) for text, service, level in drawn(picture)]

    assert found == [(str(row), row.service, row.depth) for row in rows], "run `make reference`"
    assert picture == trace_picture.picture(rows), "run `make reference`"


async def test_a_request_is_one_trace_through_all_services(rows: Sequence[Row]) -> None:
    assert {row.service for row in rows} == set(SERVICES) == set(COLORS)
    assert [row.span.outcome for row in rows if row.service == "coordinator" and row.span.outcome] == [
        "executed",
        "executed",
        "duplicate",
    ]


async def test_the_link_of_a_duplicate_is_drawn(rows: Sequence[Row]) -> None:
    picture = trace_picture.picture(rows)

    [replay] = [row for row in rows if row.span.name == "idempotency.replay"]

    assert replay.span.links == {"run": rows[1].span}
    assert picture.count('class="link"') == 1
