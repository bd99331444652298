"""The interface of the repository to one server or a cluster, and its implementation for one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar, overload

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.redis.health import Health
from integr8s_idem.stores.redis.round_trips import ReplicaWait, run, run_all, send
from integr8s_idem.stores.redis.scripts import Command, Script, command_of

Argument = bytes | int
T_co = TypeVar("T_co", covariant=True)

AT_ONCE: Final = 125
"""Keys per run of a script: while the server executes one run, the next is sent, in the same round trip."""


class Lazily(Sequence[T_co]):
    """A sequence of arguments that are encoded when they are sent, many at once."""

    def __init__(self, encode: Callable[[Sequence[Any]], list[T_co]], items: Sequence[Any]) -> None:
        self._encode = encode
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T_co]:
        return iter(self._encode(self._items))

    @overload
    def __getitem__(self, index: int) -> T_co: ...

    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...

    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, slice):
            return self._encode(self._items[index])
        return self._encode((self._items[index],))[0]


class Answered(NamedTuple):
    """The answer of one run of a script, and the indexes of its keys in the batch."""

    indexes: Sequence[int]
    answer: list[Any]


class Servers(Protocol):
    """One server or a cluster.  All methods raise errors of the driver and have no timeout: wrap them in `guarded`."""

    async def run(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[Argument],
        head: Sequence[Argument] = (),
        wait: ReplicaWait | None = None,
    ) -> list[Answered]:
        """Run a script on all keys; each run receives `head` and the arguments of its keys (one per key, or none)."""
        ...

    async def unlink(self, keys: Sequence[str], wait: ReplicaWait | None) -> int:
        """Delete keys and return how many of them existed."""
        ...

    async def primaries(self) -> list[Redis]:
        """Return one client for each primary."""
        ...

    def pattern(self, glob: str) -> str:
        """Return the pattern for SCAN that matches the keys that `glob` matches."""
        ...

    def key_of(self, name: str) -> str:
        """Return the key of a stored name."""
        ...

    async def health(self, store_id_key: str, wait: ReplicaWait | None) -> StoreHealth:
        """Check the servers; `store_id_key` identifies their data."""
        ...


class OneServer:
    """A single server, or the current primary of a group."""

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
        if len(keys) <= AT_ONCE:
            return [Answered(range(len(keys)), await run(self._client, script, keys, [*head, *args], wait))]
        parts = [range(start, min(start + AT_ONCE, len(keys))) for start in range(0, len(keys), AT_ONCE)]

        def command(part: range) -> Command:
            return command_of(script, keys[part.start : part.stop], [*head, *args[part.start : part.stop]])

        answers = await run_all(self._client, script, [partial(command, part) for part in parts], wait)
        return [Answered(part, answer) for part, answer in zip(parts, answers, strict=True)]

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

    async def health(self, store_id_key: str, wait: ReplicaWait | None) -> StoreHealth:
        return await Health(wait).of_one(self._client, store_id_key)
