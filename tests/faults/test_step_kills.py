"""Handlers with steps whose processes die at each boundary of a step, on a real Kafka and real stores."""

from __future__ import annotations

import pytest

from tests.crashes import step_points
from tests.crashes.stepping import BOUNDARIES, Moment
from tests.kafka_faults.tools import need_kafka


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.scenario(115)
def test_a_crash_at_any_boundary_skips_no_step_and_repeats_no_at_most_once_step() -> None:
    need_kafka(own=True)

    figures = step_points.run(0, step_points.CAMPAIGN.in_test)

    assert figures["jobs"] == step_points.CAMPAIGN.in_test == len(BOUNDARIES)
    assert figures["kills"] + figures["cut_short"] >= figures["jobs"]
    assert all(figures[f"kills:{moment.value}"] for moment in Moment)
    assert figures["given_up"] > 0
    assert figures["interrupted"] > figures["given_up"]


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.scenario(115)
def test_a_crash_at_a_boundary_skips_no_step_with_records_in_sql() -> None:
    need_kafka(own=True)

    figures = step_points.run(0, 8, ("sqlite", "postgresql"))

    assert figures["jobs"] == 8
    assert figures["kills"] + figures["cut_short"] >= 8
