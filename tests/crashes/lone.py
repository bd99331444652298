"""One job and one crash: without other work and other crashes, the runs can be predicted exactly."""

from __future__ import annotations

import asyncio
import signal

from integr8s_idem.testing.crash_points import CrashPoint
from tests.campaigns.figures import ViolationError
from tests.crashes.forks import ForkServer
from tests.crashes.ground import Servers, Topics
from tests.crashes.jobs import Job, Kind
from tests.crashes.judging import judge, log_tail
from tests.crashes.orders import Order
from tests.crashes.points import PATIENCE
from tests.support.effects import Effects


async def crash_one_job(
    servers: Servers, fork_server: ForkServer, point: CrashPoint, kind: Kind = "plain", *, reconciles: bool = False
) -> tuple[list[int], list[int]]:
    """Kill a worker at `point`, publish a duplicate of its job, and let another worker settle both.

    Returns:
        The attempts that started, and those whose effect happened.

    Raises:
        ViolationError: A promise was broken, or the worker did not reach `point`.
    """
    folder = servers.folder / f"single-{kind}-{point.value}"
    folder.mkdir()
    prefix = f"single-{kind}-{point.value}."
    order = Order(
        bootstrap=servers.broker.bootstrap,
        store=servers.redis_settings,
        prefix=prefix,
        folder=str(folder),
        reconciles=reconciles,
    )
    effects = Effects(folder)
    effects.prepare()
    async with servers.topic_set(prefix, partitions=1) as topics:
        job = Job(work=f"{point.value}:{kind}", kind=kind)
        await topics.publish([job])
        doomed = await fork_server.start(Order(**{**vars(order), "point": point.value}))
        async with asyncio.timeout(PATIENCE):
            status = await asyncio.shield(doomed.ended)
        if status != -signal.SIGKILL:
            raise ViolationError(f"{point.value}: exited with status {status}:\n{log_tail(folder)}")
        await topics.publish([job])
        successor = await fork_server.start(order)
        await _wait_until_settled(topics, order)
        await successor.end(signal.SIGTERM)
        await judge(topics, effects, order.key_prefix)
    lines = effects.lines()
    return (
        [line.attempt for line in lines if line.what == "begin"],
        [line.attempt for line in lines if line.what == "effect"],
    )


async def _wait_until_settled(topics: Topics, order: Order) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await topics.settled(order.group):  # noqa: ASYNC110  # the broker sends no notification
            await asyncio.sleep(0.1)
