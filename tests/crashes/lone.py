"""One job and one death: without other work and other deaths beside it, each run is known in advance."""

from __future__ import annotations

import asyncio
import signal

from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import ViolationError
from tests.crashes.forks import Nursery
from tests.crashes.ground import Ground, Topics
from tests.crashes.jobs import Job
from tests.crashes.judging import judge, last_words
from tests.crashes.orders import Order
from tests.crashes.points import PATIENCE
from tests.support.effects import Effects


async def lone_job(ground: Ground, nursery: Nursery, point: CrashPoint) -> tuple[list[int], list[int]]:
    """A worker dies at `point`; a copy of its job comes; another worker settles both.

    Returns:
        The attempts that began, and those whose effect happened.

    Raises:
        ViolationError: A promise was broken, or nobody died.
    """
    folder = ground.folder / f"lone-{point.value}"
    folder.mkdir()
    prefix = f"lone-{point.value}."
    order = Order(bootstrap=ground.broker.bootstrap, store=ground.redis_settings, prefix=prefix, folder=str(folder))
    effects = Effects(folder)
    effects.prepare()
    async with ground.topic_set(prefix, partitions=1) as topics:
        job = Job(work=f"{point.value}:plain")
        await topics.publish([job])
        doomed = await nursery.start(Order(**{**vars(order), "point": point.value}))
        async with asyncio.timeout(PATIENCE):
            status = await asyncio.shield(doomed.ended)
        if status != -signal.SIGKILL:
            raise ViolationError(f"{point.value}: ended with {status}:\n{last_words(folder)}")
        await topics.publish([job])
        heir = await nursery.start(order)
        await _settled(topics, order)
        await heir.end(signal.SIGTERM)
        await judge(topics, effects, order.key_prefix)
    lines = effects.lines()
    return (
        [line.attempt for line in lines if line.what == "begin"],
        [line.attempt for line in lines if line.what == "effect"],
    )


async def _settled(topics: Topics, order: Order) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await topics.settled(order.group):  # noqa: ASYNC110  # the broker tells nobody
            await asyncio.sleep(0.1)
