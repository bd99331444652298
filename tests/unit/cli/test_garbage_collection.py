"""Tuning of the garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from integr8s_idem.cli.garbage_collection import DEFAULT_THRESHOLDS, RARE_THRESHOLD, collect_rarely


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.parametrize("thresholds", sorted(DEFAULT_THRESHOLDS))
def test_existing_objects_are_frozen_and_new_ones_collected_rarely(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)

    collect_rarely()

    assert gc.get_threshold() == (RARE_THRESHOLD, *thresholds[1:])
    assert gc.get_freeze_count() > 10_000  # the modules that this process has imported


def test_custom_thresholds_are_kept() -> None:
    gc.set_threshold(5_000, 20, 30)

    collect_rarely()

    assert gc.get_threshold() == (5_000, 20, 30)
    assert gc.get_freeze_count() > 10_000


def test_a_disabled_collector_stays_disabled() -> None:
    gc.set_threshold(0)

    collect_rarely()

    assert gc.get_threshold()[0] == 0


def test_new_reference_cycles_are_collected() -> None:
    collect_rarely()
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle

    assert gc.collect() >= 1
