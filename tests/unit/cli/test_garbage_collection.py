"""The garbage collector of a worker's process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from integr8s_idem.cli.garbage_collection import AS_IT_COMES, SELDOM, collect_seldom


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.parametrize("thresholds", sorted(AS_IT_COMES))
def test_what_is_there_is_not_looked_at_again_and_what_is_new_seldom(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)

    collect_seldom()

    assert gc.get_threshold() == (SELDOM, *thresholds[1:])
    assert gc.get_freeze_count() > 10_000  # what this process has imported


def test_thresholds_that_somebody_has_set_stay() -> None:
    gc.set_threshold(5_000, 20, 30)

    collect_seldom()

    assert gc.get_threshold() == (5_000, 20, 30)
    assert gc.get_freeze_count() > 10_000


def test_a_collector_that_was_switched_off_stays_off() -> None:
    gc.set_threshold(0)

    collect_seldom()

    assert gc.get_threshold()[0] == 0


def test_cycles_made_later_are_found() -> None:
    collect_seldom()
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle

    assert gc.collect() >= 1
