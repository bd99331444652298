"""The interface of the repository to one server or a cluster, and its implementation for one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar, overload

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, ResponseError

from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.redis.health import Health
from integr8s_idem.stores.redis.round_trips import ReplicaWait, exchange, run_all, send
from integr8s_idem.stores.redis.scripts import Command, Script, command_of

Argument = bytes | int
T_co = TypeVar("T_co", covariant=True)

KEYS_PER_RUN: Final = 125
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


Answered: TypeAlias = tuple[Sequence[int], list[Any]]
"""The indexes of keys in the batch, and the answer of the run of a script that had them."""


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
        if len(keys) <= KEYS_PER_RUN:
            indexes, command = range(len(keys)), command_of(script, keys, [*head, *args] if head else args)
            if wait is None:
                [answer] = await exchange(self._client.connection_pool, (command,))
                if not isinstance(answer, ResponseError):
                    return [(indexes, answer)]
                if not isinstance(answer, NoScriptError):
                    raise answer
            return [(indexes, (await run_all(self._client, script, [command], wait))[0])]
        parts = [range(start, min(start + KEYS_PER_RUN, len(keys))) for start in range(0, len(keys), KEYS_PER_RUN)]

        def command_for(part: range) -> Command:
            return command_of(script, keys[part.start : part.stop], [*head, *args[part.start : part.stop]])

        answers = await run_all(self._client, script, [partial(command_for, part) for part in parts], wait)
        return list(zip(parts, answers, strict=True))

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
