"""Derive all nondeterminism of the library from the seed."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from integr8s_idem._util import deadlines, loop_fairness
from integr8s_idem.engine import executor, store_client
from integr8s_idem.worker import backoff, consumer, dead_letters, isolation_gate, poller, runners
from tests.simulation.processes import PROCESS

POLL_SECONDS: Final = 1.0
"""Poll timeout; longer than the default, so that idle workers poll less often and a run takes less time."""

WALL_CLOCK: Final = 1_893_456_000.0


def _now() -> float:
    return asyncio.get_running_loop().time()


@contextmanager
def driven_by(random: Random) -> Iterator[None]:
    """Take jitter and tokens from `random` and the time from the loop, and disable logging."""
    chance = SimpleNamespace(uniform=random.uniform)
    clocks: defaultdict[object, Any] = defaultdict(deadlines._Clock)
    paces: dict[object, Any] = {}

    def pace_of(loop: asyncio.AbstractEventLoop) -> Any:
        process = PROCESS.get()
        if process not in paces:
            paces[process] = loop_fairness.Pace(loop)
        return paces[process]

    time = SimpleNamespace(monotonic=_now, time=lambda: WALL_CLOCK + _now())
    logger = logging.getLogger("integr8s_idem")
    level = logger.level
    with ExitStack() as patches:
        for place, name, source in (
            (executor, "random", chance),
            (store_client, "new_token", lambda: random.randbytes(16)),
            # Processes share the event loop, and timers of dead processes never fire.
            (deadlines, "_clock_of", lambda _: clocks[PROCESS.get()]),
            (loop_fairness, "pace_of", pace_of),
            (runners, "pace_of", pace_of),
            (executor, "pace_of", pace_of),
            (backoff, "random", chance),
            (isolation_gate, "random", SimpleNamespace(randrange=random.randrange)),
            (consumer, "time", time),
            (poller, "time", time),
            (poller, "POLL_SECONDS", POLL_SECONDS),
            (dead_letters, "time", time),
        ):
            patches.enter_context(mock.patch.object(place, name, source))
        patches.callback(logger.setLevel, level)
        logger.setLevel(logging.CRITICAL + 1)
        yield
