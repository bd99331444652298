"""Where the records are: what the repository needs of one server, and of a cluster of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.redis.health import Health
from integr8s_idem.stores.redis.scripts import Script
from integr8s_idem.stores.redis.sending import ReplicaWait, run, send

Argument = bytes | int


class Answered(NamedTuple):
    """What one run of a script answered, and to which keys of the batch, by their indexes."""

    indexes: Sequence[int]
    answer: list[Any]


class Servers(Protocol):
    """All methods raise what the driver raises, and have no limit of time: `guarded` gives them one."""

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        head: Sequence[Argument] = (),
        wait: ReplicaWait | None = None,
    ) -> list[Answered]:
        """Run a script on all keys; each run gets `head`, and the arguments of its keys (one each, or none at all)."""
        ...

    async def unlink(self, keys: Sequence[str], wait: ReplicaWait | None) -> int:
        """Forget keys; the number of those that were there."""
        ...

    async def primaries(self) -> list[Redis]:
        """Every server that has keys."""
        ...

    def pattern(self, glob: str) -> str:
        """What SCAN must look for to find the keys that `glob` matches."""
        ...

    def key_of(self, name: str) -> str:
        """The key that a server calls `name`."""
        ...

    async def health(self, mark: str, wait: ReplicaWait | None) -> StoreHealth:
        """As `ping` of the store.  `mark`: the key that names what the servers hold."""
        ...


class OneServer:
    """A server, and whatever takes its place."""

    def __init__(self, client: Redis) -> None:
        self._client = client

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        head: Sequence[Argument] = (),
        wait: ReplicaWait | None = None,
    ) -> list[Answered]:
        return [Answered(range(len(keys)), await run(self._client, script, keys, [*head, *args], wait))]

    async def unlink(self, keys: Sequence[str], wait: ReplicaWait | None) -> int:
        (answer,) = await send(self._client, [("UNLINK", *keys)], wait)
        if isinstance(answer, ResponseError):
            raise answer
        return int(answer)

    async def primaries(self) -> list[Redis]:
        return [self._client]

    def pattern(self, glob: str) -> str:
        return glob

    def key_of(self, name: str) -> str:
        return name

    async def health(self, mark: str, wait: ReplicaWait | None) -> StoreHealth:
        return await Health(wait).of_one(self._client, mark)
