"""Who takes part: each does one unit of work's two writes, reserve and complete, in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final, Protocol

from integr8s_idem._util.tokens import new_token
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.records import Completion, Reserved, ReserveRequest, StoredResult
from integr8s_idem.stores import IdempotencyRepository

LEASE: Final = timedelta(seconds=30)
RETENTION: Final = timedelta(seconds=900)
TTL: Final = timedelta(seconds=3_600)
RESULT: Final = b'{"receipt": "receipt-1"}'
"""What a handler returns; all contestants keep it."""


class Contestant(Protocol):
    """All keys that it is given are new; it fails if one is not."""

    async def pair(self, key: str) -> None:
        """Reserve, and complete."""
        ...

    async def batch(self, keys: Sequence[str]) -> None:
        """The same for many keys, as fast as its driver can do that."""
        ...


class Store:
    """A store of this library, called as its Protocol says."""

    def __init__(self, repository: IdempotencyRepository) -> None:
        self._repository = repository

    async def pair(self, key: str) -> None:
        await self.batch([key])

    async def batch(self, keys: Sequence[str]) -> None:
        verdicts = await self._repository.reserve([_wish(key) for key in keys])
        held = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        done = await self._repository.complete(
            [Completion(reservation=one, ttl=TTL, result=StoredResult(RESULT)) for one in held]
        )
        must(len(held) == len(keys) and all(done), "not all were reserved and completed")


class Manager:
    """The same store behind an `IdempotencyManager`, as a worker has it: calls of one moment go together."""

    def __init__(self, repository: IdempotencyRepository) -> None:
        config = IdempotencyConfig(default_ttl_seconds=TTL.total_seconds(), processing_timeout_seconds=30)
        self._manager = IdempotencyManager(config, repository, scope="bench")

    async def pair(self, key: str) -> None:
        await self._manager.run(key, _work)

    async def batch(self, keys: Sequence[str]) -> None:
        raise NotImplementedError("a manager makes its batches itself")


async def _work() -> dict[str, str]:
    return {"receipt": "receipt-1"}


def _wish(key: str) -> ReserveRequest:
    return ReserveRequest(key=key, token=new_token(), lease=LEASE, retention=RETENTION, owner="bench")


def must(held: object, otherwise: str) -> None:
    """Raises AssertionError: a contestant that does not do its work is not measured."""
    if not held:
        raise AssertionError(otherwise)
