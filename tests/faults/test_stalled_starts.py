"""Workers that stall while reserved events wait for their handlers: no handler starts after its lease has ended."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import pytest

from tests.kafka_faults.application import TaskGiven
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.zombies import Pair, open_pair
from tests.stalled_starts.campaign import CAMPAIGN, control_of, open_servers, run_trials


@pytest.mark.timeout(300)
@pytest.mark.scenario(33, 34, 37, 121)
def test_no_handler_starts_after_its_lease_has_ended_wherever_its_process_stalls() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test + SPARE_TRIALS)

    assert figures["stalls"] >= CAMPAIGN.in_test
    assert figures["stalls_long"] + figures["stalls_blocked"] >= figures["stalls"] / 2
    assert (figures["lost"], figures["violations"]) == (0, 0)
    assert figures["starts_prevented"] > 0
    assert figures["takeovers_long"] > 0


SPARE_TRIALS = 4
"""Compensate for trials without a stall: controls, and trials whose work is done before the stall."""

SLOW_AND_HEALTHY = (
    ("worker", "redis"),
    ("worker", "postgresql"),
    ("worker", "sqlite"),
    ("dishka", "sqlite"),
    ("faststream", "postgresql"),
)
"""Some of the combinations; the campaign covers all of them."""


@pytest.mark.scenario(122)
@pytest.mark.timeout(180)
def test_leases_of_events_that_wait_for_slow_handlers_are_renewed() -> None:
    plans = {number: control_of(number, entry, kind) for number, (entry, kind) in enumerate(SLOW_AND_HEALTHY)}

    with open_servers(sorted({kind for _, kind in SLOW_AND_HEALTHY})) as servers:
        figures = asyncio.run(run_trials(servers, plans, plans))

    assert figures["controls"] == len(SLOW_AND_HEALTHY)
    assert figures["takeovers"] == 0
    assert figures["starts"] == figures["events"] == sum(plan.order.works for plan in plans.values())


LEASE = 4.0
EVENTS = 30
CONCURRENCY = 16
BLOCKED_LEASE = 2.0


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition with short polls: a stop has to hit one handler, and not the next."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # files send no notifications
            await asyncio.sleep(0.005)


def _processes_by_work(pair: Pair) -> dict[str, set[int]]:
    """Return the processes that have started each work."""
    started: defaultdict[str, set[int]] = defaultdict(set)
    for line in pair.effects.lines():
        if line.what == "begin":
            started[line.work].add(line.pid)
    return started


@pytest.mark.kafka
@pytest.mark.timeout(180)
@pytest.mark.scenario(33, 121)
@pytest.mark.parametrize("ordering", ["none", "key"])
async def test_a_resumed_worker_starts_no_event_that_was_handled_elsewhere(ordering: str) -> None:
    need_kafka()
    service = f'ordering = "{ordering}"\nconcurrency = {CONCURRENCY}'
    async with open_pair(lease=LEASE, service=service) as pair:
        tasks = [TaskGiven(work=f"{number}", aggregate_id=f"{number}", blocks=0.1) for number in range(EVENTS)]
        await pair.give(*tasks)
        await _until(lambda: len(_processes_by_work(pair)) >= 2)
        holder, other = pair.of_process(pair.effects.lines()[0].pid)
        await pair.stop(holder)

        await _until(lambda: len(pair.effects.ended()) == EVENTS)
        await pair.settled(0)
        before = pair.effects.lines()
        holder.continue_signal()
        # Wait until the resumed worker has checked all of its reservations.
        await pair.together()
        await pair.give(TaskGiven(work="last"))
        await pair.settled(EVENTS)

        later = [line for line in pair.effects.lines()[len(before) :] if line.what == "begin"]
        assert [line.work for line in later] == ["last"], pair.snapshot()
        attempts = {line.work: line.attempt for line in before if line.what == "begin"}
        assert set(attempts.values()) == {1, 2}
        assert pair.effects.judge(pair.given)["lost"] == 0
        assert sum(other.pid in pids for pids in _processes_by_work(pair).values()) >= EVENTS - CONCURRENCY


@pytest.mark.kafka
@pytest.mark.timeout(180)
@pytest.mark.scenario(37, 121)
async def test_events_that_wait_while_a_handler_blocks_the_loop_do_not_run_on_both_workers() -> None:
    need_kafka()
    service = f'ordering = "none"\nconcurrency = {CONCURRENCY}'
    async with open_pair(lease=BLOCKED_LEASE, service=service) as pair:
        blocked = TaskGiven(work="blocked", aggregate_id="blocked", blocks=3 * BLOCKED_LEASE)
        others = [TaskGiven(work=f"{number}", aggregate_id=f"{number}") for number in range(CONCURRENCY + 4)]
        await pair.give(blocked, *others)

        await pair.until("end", "blocked", 2)
        await pair.until("applied", "blocked", 1)
        await pair.together()
        await pair.settled(0)

        on_both = {work for work, pids in _processes_by_work(pair).items() if len(pids) == 2}
        # Handlers that ended just before the loop was blocked could not be recorded.
        ended = _ended_before("blocked", pair)
        assert on_both - ended == {"blocked"}, pair.snapshot()
        assert pair.effects.judge(pair.given)["repeats"] == len(on_both)


def _ended_before(work: str, pair: Pair) -> set[str]:
    """Return the work that had ended when `work` was started for the first time."""
    ended: set[str] = set()
    for line in pair.effects.lines():
        if (line.what, line.work) == ("begin", work):
            return ended
        if line.what == "end":
            ended.add(line.work)
    raise AssertionError(f"{work} was never started")
