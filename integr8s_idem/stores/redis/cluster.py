"""Records in a Redis Cluster: a batch is one round trip to each server involved, all in parallel."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,  # noqa: A004  # the driver's
    MovedError,
    NoScriptError,
    TimeoutError,  # noqa: A004  # the driver's
    TryAgainError,
)

from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.redis.buckets import BUCKETS, TAGS, bucket_of, key_of
from integr8s_idem.stores.redis.health import Health, new_store_id
from integr8s_idem.stores.redis.round_trips import Address, ReplicaWait, all_of, send
from integr8s_idem.stores.redis.scripts import LOADS, MARK, Command, Script, command_of
from integr8s_idem.stores.redis.servers import Answered, Argument
from integr8s_idem.stores.redis.topology import Topology, address_of

_MOST_ROUNDS: Final = 32
"""Rounds of redirects per batch; with the pauses in between, they take longer than any sensible timeout."""
_MOST_FAILURES: Final = 3
"""Number of times a call may meet an unreachable server or a cluster that is down, before the error is raised."""
_UNREACHABLE: Final = (ConnectionError, TimeoutError, OSError)
_SHORTEST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.1


@dataclass(slots=True)
class Call:
    """A call on one bucket: runs `script`, or without one deletes the keys."""

    bucket: int
    script: Script | None
    indexes: list[int]
    names: list[str]
    args: list[Argument]
    head: Sequence[Argument] = ()
    ask: Address | None = None
    """Server to ask this time instead of the owner: the bucket is being moved there."""
    failures: int = 0

    def commands(self) -> list[Command]:
        command: Command = ("UNLINK", *self.names)
        if self.script is not None:
            command = command_of(self.script, self.names, [*self.head, *self.args])
        return [command] if self.ask is None else [("ASKING",), command]

    def split(self) -> list[Call]:
        """Return one call for each key."""
        positions: defaultdict[str, list[int]] = defaultdict(list)
        for position, name in enumerate(self.names):
            positions[name].append(position)
        return [
            replace(
                self,
                indexes=[self.indexes[position] for position in same],
                names=[name] * len(same),
                args=[self.args[position] for position in same] if self.args else [],
                ask=None,
            )
            for name, same in positions.items()
        ]


class RedisClusterClient:
    """Client of a Redis Cluster for `RedisClusterIdempotencyRepository`.  Close it with `aclose()`.

    `redis_cluster_client` creates one from settings.  It connects on first use.

    Redirects (MOVED, ASK) are followed.  While a slot moves from one server to another, the keys of a call
    may be on different servers (TRYAGAIN): the call is then split into one call per key.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._health: Health | None = None

    async def aclose(self) -> None:
        """Close all connections."""
        await self._topology.aclose()

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        head: Sequence[Argument] = (),
        wait: ReplicaWait | None = None,
    ) -> list[Answered]:
        calls: dict[int, Call] = {}
        args = list(args)  # encodes all of them at once
        for index, key in enumerate(keys):
            bucket = bucket_of(key)
            call = calls.get(bucket)
            if call is None:
                call = calls[bucket] = Call(bucket, script, [], [], [], head)
            call.indexes.append(index)
            call.names.append(TAGS[bucket] + key)
            if args:
                call.args.append(args[index])
        return await self._follow(calls.values(), wait)

    async def unlink(self, keys: Sequence[str], wait: ReplicaWait | None) -> int:
        calls = []
        for index, key in enumerate(keys):
            bucket = bucket_of(key)
            calls.append(Call(bucket, None, [index], [TAGS[bucket] + key], []))
        return sum(int(answer) for _, answer in await self._follow(calls, wait))  # type: ignore[call-overload]

    async def primaries(self) -> list[Redis]:
        return [self._topology.client(address) for address in await self._topology.primaries()]

    def pattern(self, glob: str) -> str:
        return "{idem:*}" + glob

    def key_of(self, name: str) -> str:
        return key_of(name)

    async def health(self, store_id_key: str, wait: ReplicaWait | None) -> StoreHealth:
        """Read the store ids: every bucket has one, so that a server that loses its records also loses store ids."""
        fresh = new_store_id().encode()
        names = [tag + store_id_key for tag in TAGS]
        calls = [Call(bucket, MARK, [bucket], [name], [fresh]) for bucket, name in enumerate(names)]
        store_ids: list[Any] = [b""] * BUCKETS
        for indexes, answer in await self._follow(calls, wait):
            store_ids[indexes[0]] = answer
        if self._health is None:
            self._health = Health(wait)
        return await self._health.of_cluster(
            {address: self._topology.client(address) for address in await self._topology.primaries()}, store_ids
        )

    async def _follow(self, calls: Iterable[Call], wait: ReplicaWait | None) -> list[Answered]:
        """Send the calls and follow redirects until every call is answered."""
        answered: list[Answered] = []
        pending = list(calls)
        if not pending:
            return []
        try:
            for turn in range(_MOST_ROUNDS):
                again: list[Call] = []
                for address, call, answer in await self._round(pending, wait):
                    if isinstance(answer, Exception):
                        again += self._next_calls(answer, call, address)
                    else:
                        answered.append((call.indexes, answer))
                if not again:
                    return answered
                if turn:
                    # The first redirect is followed at once: it usually leads to the right place.
                    await asyncio.sleep(min(_SHORTEST_PAUSE * 2**turn, _LONGEST_PAUSE))
                pending = again
        except BaseException:
            # A server that did not answer may have been replaced.
            self._topology.forget()
            raise
        raise TryAgainError("too many redirects")

    def _next_calls(self, error: Exception, call: Call, asked: Address) -> list[Call]:
        """Return the calls to send after `error`; raise it if a retry does not help."""
        call.ask = None
        if isinstance(error, MovedError):
            self._topology.moved(call.bucket, address_of(error.host, error.port, asked))
        elif isinstance(error, AskError):
            call.ask = address_of(error.host, error.port, asked)
        elif isinstance(error, TryAgainError):
            return call.split()
        else:
            call.failures += 1
            if not isinstance(error, (ClusterDownError, *_UNREACHABLE)) or call.failures == _MOST_FAILURES:
                raise error
            self._topology.forget()
        return [call]

    async def _round(self, calls: Sequence[Call], wait: ReplicaWait | None) -> list[tuple[Address, Call, Any]]:
        """Send calls in one round trip to each server, all in parallel; return the answer or error of each call."""
        by_server: defaultdict[Address, list[Call]] = defaultdict(list)
        for call in calls:
            by_server[call.ask or await self._topology.owner(call.bucket)].append(call)
        servers = list(by_server.items())
        outcomes = await all_of([self._ask(address, some, wait) for address, some in servers])
        return [
            (address, call, answer)
            for (address, some), answers in zip(servers, outcomes, strict=True)
            for call, answer in zip(some, answers, strict=True)
        ]

    async def _ask(self, address: Address, calls: Sequence[Call], wait: ReplicaWait | None) -> list[Any]:
        """Return the answer or error of each call; load the scripts that the server does not know."""
        client = self._topology.client(address)
        answers: list[Any] = [None] * len(calls)
        pending = list(range(len(calls)))
        try:
            for load in range(LOADS + 1):
                received = await _send(client, [calls[index] for index in pending], wait)
                for index, answer in zip(pending, received, strict=True):
                    answers[index] = answer
                pending = [index for index in pending if isinstance(answers[index], NoScriptError)]
                if not pending or load == LOADS:
                    break
                for text in {script.text for index in pending if (script := calls[index].script) is not None}:
                    await client.script_load(text)
        except _UNREACHABLE as error:
            return [error if index in pending else answers[index] for index in range(len(calls))]
        return answers


async def _send(client: Redis, calls: Sequence[Call], wait: ReplicaWait | None) -> list[Any]:
    commands: list[Command] = []
    ends = []
    for call in calls:
        commands += call.commands()
        ends.append(len(commands) - 1)
    answers = await send(client, commands, wait)
    return [answers[end] for end in ends]
