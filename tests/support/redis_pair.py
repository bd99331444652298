"""A Redis primary whose replica lags behind it as far as a test wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.conditions import eventually
from tests.support.fault_proxy import FaultProxy
from tests.support.redis import RedisServer


class Pair:
    """A primary, a replica that lags behind it as far as wanted, and one address for whoever is the primary."""

    def __init__(self, old: RedisServer, new: RedisServer, link: FaultProxy, front: FaultProxy) -> None:
        self.old, self.new, self.link, self.front = old, new, link, front

    async def in_step(self) -> None:
        """Return once the replica has everything."""
        await asyncio.to_thread(self.old.admin, "SET", "step", time.monotonic_ns())
        await eventually(lambda: self.new.admin("GET", "step") == self.old.admin("GET", "step"))

    @property
    def replicas_in_step(self) -> int:
        """Of the new primary: the old one, once `follow` has been called."""
        return str(self.new.admin("INFO", "replication")).count("'state': 'online'")

    async def follow(self) -> None:
        """The old primary comes back, with its disk, as the replica of the new one."""
        self.old.config["replicaof"] = ["127.0.0.1", str(self.new.port)]
        await asyncio.to_thread(self.old.start)
        await eventually(lambda: self.replicas_in_step)

    async def fail_over(self) -> None:
        """The primary dies with what it has not passed on, and the replica takes its place."""
        self.old.kill()
        await asyncio.to_thread(self.new.admin, "REPLICAOF", "NO", "ONE")
        self.front.target = self.new.address
        self.front.reset()


@asynccontextmanager
async def lagging_pair() -> AsyncIterator[Pair]:
    with RedisServer(tcp=True, config={"repl-diskless-sync-delay": "0"}) as old:
        async with FaultProxy(old.address) as link, FaultProxy(old.address) as front:
            with RedisServer(tcp=True, config={"replicaof": ["127.0.0.1", str(link.address)]}) as new:
                yield Pair(old, new, link, front)
