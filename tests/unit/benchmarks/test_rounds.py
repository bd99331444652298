"""Comparisons in rounds: which time a figure compares."""

from __future__ import annotations

import pytest

from benchmarks.rounds import Comparison, Measured, Options, compare


@pytest.mark.parametrize(("by_cpu", "ratio"), [(False, 0.5), (True, 0.25)])
async def test_a_figure_compares_rates_or_cpu_time(by_cpu: bool, ratio: float) -> None:
    async def fast(_: float) -> Measured:
        return Measured(events=100, seconds=1.0, cpu=0.1)

    async def slow(_: float) -> Measured:
        return Measured(events=100, seconds=2.0, cpu=0.4)

    turns, figures = {"integr8s_idem": slow, "raw": fast}, {"figure": ("integr8s_idem", "raw")}
    results = await compare(Comparison("here", turns, figures, by_cpu=by_cpu), Options(rounds=2), lambda _: None)

    assert (results["figure"], results["figure.cpu_ratio"]) == (ratio, 0.25)
