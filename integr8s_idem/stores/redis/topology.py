"""Which server of a Redis Cluster has which bucket, as the servers tell it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ClusterDownError, RedisError, ResponseError

from integr8s_idem.stores.redis.buckets import BUCKET_SLOTS
from integr8s_idem.stores.redis.round_trips import Address

_UNKNOWN_HOST: Final = ("", "?")


class Topology:
    """The clients of a cluster's servers, and the owners of its buckets.

    Args:
        seeds: Servers to ask first; the others are learned from them.
        make: A client for an address.
        ask_seconds: Longest wait for one server before another one is asked.
    """

    def __init__(self, seeds: Sequence[Address], make: Callable[[Address], Redis], ask_seconds: float) -> None:
        self._seeds = list(seeds)
        self._make = make
        self._ask_seconds = ask_seconds
        self._clients: dict[Address, Redis] = {}
        self._known: list[Address] = []
        self._owners: list[Address | None] = []
        self._fresh = False
        self._asking = asyncio.Lock()

    def client(self, address: Address) -> Redis:
        """Kept until the end: a client without connections costs little, and closing one would cut off its callers."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._make(address)
        return client

    async def aclose(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    def forget(self) -> None:
        """Ask anew before the next use."""
        self._fresh = False

    def moved(self, bucket: int, owner: Address) -> None:
        """A server told who has this bucket.

        That is newer than what another one would tell, so none is asked: each bucket that has moved costs
        one redirect, once.
        """
        self._owners[bucket] = owner

    async def owner(self, bucket: int) -> Address:
        """Raises ClusterDownError if nobody has it, and what the driver raises if no server answers."""
        if not self._fresh:
            await self._refresh()
        owner = self._owners[bucket]
        if owner is None:
            raise ClusterDownError("Hash slot not served")
        return owner

    async def primaries(self) -> list[Address]:
        """The servers that have buckets, each once."""
        await self.owner(0)
        return list(dict.fromkeys(owner for owner in self._owners if owner is not None))

    async def _refresh(self) -> None:
        async with self._asking:
            if self._fresh:
                return
            ranges, asked = await self._ask()
            owners, known = _read(ranges, asked)
            self._owners, self._known, self._fresh = owners, known, True

    async def _ask(self) -> tuple[list[Any], Address]:
        """What some server says, and which.  One that hangs costs its share of the time; one that refuses, nothing."""
        refused: Exception | None = None
        known = [address for address in self._known if address not in self._seeds]
        # In any order: the one that was asked last may be the one that knows nothing new.
        for address in random.sample(self._seeds, len(self._seeds)) + random.sample(known, len(known)):
            try:
                async with asyncio.timeout(self._ask_seconds):
                    answer: list[Any] = await self.client(address).execute_command("CLUSTER", "SLOTS")  # type: ignore[no-untyped-call]
            except ResponseError as error:
                refused = error
            except (RedisError, OSError) as error:
                refused = refused or error
            else:
                if answer:
                    return answer, address
                refused = refused or ClusterDownError("it has no slots")
        assert refused is not None, "a cluster has seeds"
        raise refused


def _read(ranges: list[Any], asked: Address) -> tuple[list[Address | None], list[Address]]:
    """Owners by bucket, and all servers, from CLUSTER SLOTS: [[first, last, [host, port, …] of the primary, …], …]."""
    owners: list[Address | None] = [None] * len(BUCKET_SLOTS)
    known: dict[Address, None] = {}
    for first, last, *servers in ranges:
        addresses = [address_of(server[0], server[1], asked) for server in servers]
        known.update(dict.fromkeys(addresses))
        for bucket, slot in enumerate(BUCKET_SLOTS):
            if first <= slot <= last:
                owners[bucket] = addresses[0]
    return owners, list(known)


def address_of(host: bytes | str | None, port: int, told_by: Address) -> Address:
    """An address as a server told it: one that does not know its own is where it was asked."""
    name = host.decode() if isinstance(host, bytes) else host or ""
    return (told_by[0] if name in _UNKNOWN_HOST else name), int(port)
