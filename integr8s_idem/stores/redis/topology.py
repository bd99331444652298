"""The servers of a Redis Cluster and the buckets they own."""

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
        seeds: Servers to ask first; the others are discovered from them.
        make: Creates the client for an address.
        ask_seconds: Limit for one server before the next one is asked.
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
        """Return the client for an address; it stays open, since closing it would cut off its callers."""
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = self._make(address)
        return client

    async def aclose(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    def forget(self) -> None:
        """Ask for the topology again before the next use."""
        self._fresh = False

    def moved(self, bucket: int, owner: Address) -> None:
        """Record the owner of a bucket from a redirect.

        A redirect is more recent than the answer of another server, so no server is asked: each moved bucket
        costs a single redirect.
        """
        self._owners[bucket] = owner

    async def owner(self, bucket: int) -> Address:
        """Return the owner of a bucket.

        Raises:
            ClusterDownError: The bucket has no owner.
            RedisError: No server answers.
        """
        if not self._fresh:
            await self._refresh()
        owner = self._owners[bucket]
        if owner is None:
            raise ClusterDownError("Hash slot not served")
        return owner

    async def primaries(self) -> list[Address]:
        """Return the servers that own buckets."""
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
        """Return the answer of the first server that knows the topology, and its address."""
        refused: Exception | None = None
        known = [address for address in self._known if address not in self._seeds]
        # In random order, so that a server with outdated knowledge is not always asked first.
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
    """Parse CLUSTER SLOTS, [[first, last, [host, port, …] of the primary, …], …], into owners by bucket and servers."""
    owners: list[Address | None] = [None] * len(BUCKET_SLOTS)
    known: dict[Address, None] = {}
    for first, last, *servers in ranges:
        addresses = [address_of(server[0], server[1], asked) for server in servers]
        known.update(dict.fromkeys(addresses))
        for bucket, slot in enumerate(BUCKET_SLOTS):
            if first <= slot <= last:
                owners[bucket] = addresses[0]
    return owners, list(known)


def address_of(host: bytes | str | None, port: int, source: Address) -> Address:
    """Return a reported address; a server that does not know its own host is reachable at `source`."""
    name = host.decode() if isinstance(host, bytes) else host or ""
    return (source[0] if name in _UNKNOWN_HOST else name), int(port)
