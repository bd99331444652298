"""Where the records are: what the repository needs of one server, and of a cluster of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
"""Keys of one run of a script: while the server is at one, the next is on its way, in the same round trip."""


class Lazily(Sequence[T_co]):
    """The arguments of many keys, each made when it is sent."""

    def __init__(self, make: Callable[[Any], T_co], of: Sequence[Any]) -> None:
        self._make = make
        self._of = of

    def __len__(self) -> int:
        return len(self._of)

    @overload
    def __getitem__(self, place: int) -> T_co: ...

    @overload
    def __getitem__(self, place: slice) -> list[T_co]: ...

    def __getitem__(self, place: int | slice) -> T_co | list[T_co]:
        return list(map(self._make, self._of[place])) if isinstance(place, slice) else self._make(self._of[place])


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
        """Every server that has keys, each once."""
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

    async def health(self, mark: str, wait: ReplicaWait | None) -> StoreHealth:
        return await Health(wait).of_one(self._client, mark)
