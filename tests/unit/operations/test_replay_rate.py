"""The rate of replays."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letter_reader import Page
from integr8s_idem.operations.dead_letters import StoredDeadLetter
from integr8s_idem.operations.replay_rate import ReplayRate, parse_rate
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.dead_letters import dead_letter_of


def page_of(size: int, offsets: int | None = None) -> Page:
    return Page([StoredDeadLetter(dead_letter_of(number)) for number in range(size)], offsets or size)


@pytest.mark.parametrize(("text", "rate"), [("50/s", 50), ("5", 5), ("90/m", 1.5), ("1800/h", 0.5), ("0.5/s", 0.5)])
def test_a_rate_is_per_second_minute_or_hour(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "0", "0/s", "-1/s", "5/d", "s", "5 /s", "1e3", "٣"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(ApplicationError, match="50/s"):
        parse_rate(text)


@pytest.mark.parametrize("size", [0, 1, 4, 5, 6, 23])
@pytest.mark.parametrize("offsets", [0, 3, 100])
def test_parts_of_a_page_have_all_dead_letters_and_all_progress(size: int, offsets: int) -> None:
    page = Page(page_of(size).dead_letters, offsets)

    parts = list(ReplayRate(50).parts(page))

    assert [each for part in parts for each in part.dead_letters] == page.dead_letters
    assert sum(part.offsets_read for part in parts) == offsets
    assert all(part.offsets_read >= 0 for part in parts)
    assert max(len(part.dead_letters) for part in parts) <= 5


def test_without_a_limit_a_page_is_one_part() -> None:
    page = page_of(500)

    assert list(ReplayRate(None).parts(page)) == [page]


@virtual_time
async def test_replays_take_the_time_that_the_rate_asks_for() -> None:
    rate, published, loop = ReplayRate(20), list[float](), asyncio.get_running_loop()

    for part in rate.parts(page_of(101)):
        await rate.wait()
        published += [loop.time()] * len(part.dead_letters)
        rate.note(len(part.dead_letters))

    assert published[-1] == pytest.approx(100 / 20)
    for second in range(5):
        assert sum(second - 1e-6 <= at < second + 1 - 1e-6 for at in published) == 20


@virtual_time
async def test_skipped_dead_letters_take_no_time() -> None:
    rate, loop = ReplayRate(1), asyncio.get_running_loop()

    for _ in rate.parts(page_of(50)):
        await rate.wait()
        rate.note(0)

    assert loop.time() == 0


@virtual_time
async def test_a_slow_broker_is_not_followed_by_a_burst() -> None:
    rate, loop = ReplayRate(10), asyncio.get_running_loop()
    for _ in range(2):
        await rate.wait()
        await asyncio.sleep(5)
        rate.note(1)
    started = loop.time()

    for _ in range(10):
        await rate.wait()
        rate.note(1)

    assert loop.time() - started == pytest.approx(1.0)
