"""The watermark, compared with a simple model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.worker.offset_progress import Progress


@given(
    first=st.integers(0, 1_000),
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    seed=st.integers(0, 2**32),
)
def test_with_positions_noted_everything_below_the_watermark_is_finished_or_was_never_delivered(
    first: int, gaps: list[int], seed: int
) -> None:
    chance, progress = random.Random(seed), Progress()
    position = first
    open_ones, finished, committed = list[int](), set[int](), first
    for gap in gaps:
        for _ in range(chance.randrange(3)):
            progress.deliver(position)
            open_ones.append(position)
            position += 1
        if chance.random() < 0.7:  # markers
            position += gap
            progress.fetched_to(position, first)
        while open_ones and chance.random() < 0.6:
            done = open_ones.pop(chance.randrange(len(open_ones)))
            finished.add(done)
            progress.finish(done)

        watermark = progress.committable
        assert watermark is None or watermark <= min([*open_ones, position])
        if (offset := progress.to_commit) is not None:
            assert offset > committed
            progress.committed = committed = offset

    for offset in open_ones:
        progress.finish(offset)
    progress.fetched_to(position, first)
    assert progress.to_commit in (position, None)
    assert progress.to_commit is not None or committed == position


@pytest.mark.scenario(72)
@given(
    first=st.integers(0, 1_000),
    gaps=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    seed=st.integers(0, 2**32),
)
def test_in_any_order_of_completion_everything_below_the_watermark_is_finished(
    first: int, gaps: list[int], seed: int
) -> None:
    chance, progress = random.Random(seed), Progress()
    offsets, at = list[int](), first
    for gap in gaps:
        offsets.append(at)
        at += gap
    waiting, open_ones, finished = list(offsets), list[int](), set[int]()

    while waiting or open_ones:
        if waiting and (not open_ones or chance.random() < 0.5):
            open_ones.append(waiting.pop(0))
            assert progress.deliver(open_ones[-1]) == [True]
        else:
            done = open_ones.pop(chance.randrange(len(open_ones)))
            finished.add(done)
            progress.finish(done)

        delivered = offsets[: len(offsets) - len(waiting)]
        unfinished = [offset for offset in delivered if offset not in finished]
        assert progress.unfinished == len(unfinished)
        assert progress.committable == (unfinished[0] if unfinished else delivered[-1] + 1)
        assert progress.span == sum(offset >= progress.committable for offset in delivered)
        committed = progress.to_commit
        if committed is not None:
            assert committed > (progress.committed if progress.committed is not None else first)
            progress.committed = committed

    assert progress.committed == offsets[-1] + 1


def test_nothing_is_committed_before_something_is_finished() -> None:
    progress = Progress()
    assert progress.to_commit is None

    progress.deliver(7)
    progress.deliver(9)
    progress.finish(9)
    assert progress.to_commit is None

    progress.finish(7)
    assert progress.to_commit == 10


def test_an_offset_is_delivered_once() -> None:
    progress = Progress()

    answers = progress.deliver(5, 6, 5, 6, 8, 7)

    assert answers == [True, True, False, False, True, False]
    assert progress.next_offset == 9


def test_a_watermark_is_committed_once() -> None:
    progress = Progress()
    progress.deliver(0)
    progress.finish(0)
    progress.committed = progress.to_commit

    assert progress.committed == 1
    assert progress.to_commit is None


def test_a_position_after_markers_is_committed_when_everything_before_it_is_finished() -> None:
    progress = Progress()
    progress.deliver(5)
    progress.fetched_to(9, 5)
    before = progress.to_commit

    progress.finish(5)

    assert (before, progress.to_commit, progress.next_offset) == (None, 9, 9)


def test_a_position_after_only_markers_is_committed() -> None:
    progress = Progress()

    found = []
    for position in (5, 7):
        progress.fetched_to(position, 5)
        found.append((progress.next_offset, progress.to_commit))

    assert found == [(None, None), (7, 7)]


def test_a_position_before_a_delivered_offset_changes_nothing() -> None:
    progress = Progress()
    progress.deliver(5)
    progress.finish(5)

    progress.fetched_to(2, 0)

    assert (progress.next_offset, progress.to_commit) == (6, 6)
