"""A Redis primary with a replica whose lag the test controls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.conditions import eventually
from tests.support.fault_proxy import FaultProxy
from tests.support.redis import RedisServer


class Pair:
    """A primary, a replica with a controllable lag, and an address that leads to the current primary."""

    def __init__(self, old: RedisServer, new: RedisServer, link: FaultProxy, front: FaultProxy) -> None:
        self.old, self.new, self.link, self.front = old, new, link, front

    async def in_step(self) -> None:
        """Return once the replica is in sync."""
        await asyncio.to_thread(self.old.admin, "SET", "step", time.monotonic_ns())
        await eventually(lambda: self.new.admin("GET", "step") == self.old.admin("GET", "step"))

    @property
    def replicas_in_step(self) -> int:
        """Number of replicas in sync with the new primary: 1 after `follow`."""
        return str(self.new.admin("INFO", "replication")).count("'state': 'online'")

    async def follow(self) -> None:
        """Restart the old primary with its data as a replica of the new one."""
        self.old.config["replicaof"] = ["127.0.0.1", str(self.new.port)]
        await asyncio.to_thread(self.old.start)
        await eventually(lambda: self.replicas_in_step)

    async def fail_over(self) -> None:
        """Kill the primary with its unreplicated writes, and promote the replica."""
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
