"""Records in a Redis Cluster: a batch is one round trip to each server that has keys of it, all at once."""

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
from integr8s_idem.stores.redis.health import Health, fresh_mark
from integr8s_idem.stores.redis.round_trips import Address, ReplicaWait, all_of, send
from integr8s_idem.stores.redis.scripts import LOADS, MARK, Command, Script, command_of
from integr8s_idem.stores.redis.servers import Answered, Argument
from integr8s_idem.stores.redis.topology import Topology, address_of

_MOST_ROUNDS: Final = 32
"""Times that a batch follows its keys; with the pauses in between more than any timeout should be."""
_MOST_FAILURES: Final = 3
"""Times that a server may be unreachable or say that the cluster is down, before the caller is told."""
_UNREACHABLE: Final = (ConnectionError, TimeoutError, OSError)
_SHORTEST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.1


@dataclass(slots=True)
class Call:
    """What is asked of one bucket: a script, or without one that its keys be forgotten."""

    bucket: int
    script: Script | None
    indexes: list[int]
    names: list[str]
    args: list[Argument]
    head: Sequence[Argument] = ()
    ask: Address | None = None
    """Where to ask this time, though the owner is another one: the bucket is on its way there."""
    failures: int = 0

    def commands(self) -> list[Command]:
        command: Command = ("UNLINK", *self.names)
        if self.script is not None:
            command = command_of(self.script, self.names, [*self.head, *self.args])
        return [command] if self.ask is None else [("ASKING",), command]

    def split(self) -> list[Call]:
        """One call for each key."""
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, name in enumerate(self.names):
            places[name].append(place)
        return [
            replace(
                self,
                indexes=[self.indexes[place] for place in some],
                names=[name] * len(some),
                args=[self.args[place] for place in some] if self.args else [],
                ask=None,
            )
            for name, some in places.items()
        ]


class RedisClusterClient:
    """The servers of a Redis Cluster, to be given to `RedisIdempotencyRepository`.  Close it with `aclose()`.

    `redis_cluster_client` makes one from settings.  Opens nothing yet.

    Redirects (MOVED, ASK) are followed.  While a slot is on its way from one server to another, keys that
    are asked for together may be in different places (TRYAGAIN): they are then asked for one by one.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._health: Health | None = None

    async def aclose(self) -> None:
        """Close all connections; to be called once."""
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
        return sum(int(answered.answer) for answered in await self._follow(calls, wait))  # type: ignore[call-overload]

    async def primaries(self) -> list[Redis]:
        return [self._topology.client(address) for address in await self._topology.primaries()]

    def pattern(self, glob: str) -> str:
        return "{idem:*}" + glob

    def key_of(self, name: str) -> str:
        return key_of(name)

    async def health(self, mark: str, wait: ReplicaWait | None) -> StoreHealth:
        """Every bucket has a mark: whichever server loses its records, loses marks with them."""
        fresh = fresh_mark()
        calls = [Call(bucket, MARK, [bucket], [TAGS[bucket] + mark], [fresh.encode()]) for bucket in range(BUCKETS)]
        marks: list[Any] = [b""] * BUCKETS
        for answered in await self._follow(calls, wait):
            marks[answered.indexes[0]] = answered.answer
        if self._health is None:
            self._health = Health(wait)
        return await self._health.of_cluster(
            {address: self._topology.client(address) for address in await self._topology.primaries()}, marks
        )

    async def _follow(self, calls: Iterable[Call], wait: ReplicaWait | None) -> list[Answered]:
        """Ask, and ask again where a server sends us elsewhere, until everything is answered."""
        answered: list[Answered] = []
        pending = list(calls)
        if not pending:
            return []
        try:
            for turn in range(_MOST_ROUNDS):
                again: list[Call] = []
                for address, call, answer in await self._round(pending, wait):
                    if isinstance(answer, Exception):
                        again += self._after(answer, call, address)
                    else:
                        answered.append(Answered(call.indexes, answer))
                if not again:
                    return answered
                if turn:
                    # The first redirect is followed at once: it usually leads to the right place.
                    await asyncio.sleep(min(_SHORTEST_PAUSE * 2**turn, _LONGEST_PAUSE))
                pending = again
        except BaseException:
            # Whoever gave no answer may have a successor.
            self._topology.forget()
            raise
        raise TryAgainError("no end of redirects")

    def _after(self, error: Exception, call: Call, asked: Address) -> list[Call]:
        """What to ask after an error; raises it where asking again does not help."""
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
        """One round trip to each server that is asked something, all at once: what came of each call."""
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
        """The answer or error of each call.  The server is given the scripts that it does not know."""
        client = self._topology.client(address)
        answers: list[Any] = [None] * len(calls)
        asked = list(range(len(calls)))
        try:
            for load in range(LOADS + 1):
                told = await _send(client, [calls[place] for place in asked], wait)
                for place, answer in zip(asked, told, strict=True):
                    answers[place] = answer
                asked = [place for place in asked if isinstance(answers[place], NoScriptError)]
                if not asked or load == LOADS:
                    break
                for text in {script.text for place in asked if (script := calls[place].script) is not None}:
                    await client.script_load(text)
        except _UNREACHABLE as error:
            return [error if place in asked else answers[place] for place in range(len(calls))]
        return answers


async def _send(client: Redis, calls: Sequence[Call], wait: ReplicaWait | None) -> list[Any]:
    commands: list[Command] = []
    ends = []
    for call in calls:
        commands += call.commands()
        ends.append(len(commands) - 1)
    answers = await send(client, commands, wait)
    return [answers[end] for end in ends]
