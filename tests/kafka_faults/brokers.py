"""Campaign `broker-restarts`: the only broker is killed, shut down or stalled under load.

In two of five runs, it is down for longer than several sessions of its members.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterable
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.kafka_faults import servers
from tests.kafka_faults.workload import Workload, open_workload
from tests.support.conditions import eventually
from tests.support.kafka.broker import KafkaBroker

RECOVERS_WITHIN: Final = 60.0
"""Maximum number of seconds from the broker's return to the next effect."""

SESSION: Final = 2.0
"""Seconds."""

LONG_OUTAGES: Final = {1: 8.0, 4: 20.0}
"""Duration of long outages in seconds, by the run's number modulo five."""


async def disturb(broker: KafkaBroker, number: int) -> str:
    """Make the broker unavailable for a while, and return a description of the fault."""
    rng = random.Random(number)
    how = rng.choice(("killed", "restarted", "stalled"))
    outage = LONG_OUTAGES.get(number % 5, rng.uniform(0.0, 3.0))
    if how == "stalled":
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(outage)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
    else:
        await asyncio.to_thread(broker.kill if how == "killed" else broker.stop)
        await asyncio.sleep(outage)
        await asyncio.to_thread(broker.start)
    return f"{how}, down for {outage:.1f} s"


async def wait_for_progress(workload: Workload) -> None:
    """Wait until an event that is published from now on has been handled."""
    rounds = workload.rounds

    def newer() -> bool:
        return any(int(work.split("-")[1]) > rounds for work in workload.effects.done())

    await eventually(newer, within=RECOVERS_WITHIN, state=workload.snapshot)


async def _run(numbers: Iterable[int]) -> Figures:
    figures, done = Figures(), "not started"
    broker = await asyncio.to_thread(servers.own_broker)
    try:
        async with open_workload(broker, session_timeout_seconds=SESSION) as workload:
            for _ in range(2):
                await workload.join()
            await eventually(lambda: all(member.worker.health().ready for member in workload.members))
            feeding = asyncio.create_task(workload.feed(every=0.2))
            try:
                for number in numbers:
                    try:
                        done = await disturb(broker, number)
                        await wait_for_progress(workload)
                    except AssertionError as error:
                        raise ViolationError(f"restart {number} ({done}): {error}") from error
                    figures.update(restarts=1)
            finally:
                feeding.cancel()
                await asyncio.wait({feeding})
            await workload.all_settled()
            figures.update(await workload.judge())
    finally:
        await asyncio.to_thread(broker.kill)
    return figures


def run(first: int, count: int) -> Figures:
    """Perform the restarts numbered `first` to `first + count - 1`, one after the other."""
    return asyncio.run(_run(range(first, first + count)))


CAMPAIGN: Final = Campaign(
    name="broker-restarts",
    counts="restarts",
    says="the only broker is killed, restarted or stalled (SIGSTOP) for up to 20 seconds under load",
    scenarios=(60, 61),
    in_test=2,
    target=50,
    batch=5,
    run=run,
)
