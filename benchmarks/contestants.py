"""Contestants: each does the two writes of a unit of work, reserve and complete, in its own way."""

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
"""The result that a handler returns; all contestants store it."""


class Contestant(Protocol):
    """Reserves and completes new keys; fails if a key is not new."""

    async def pair(self, key: str) -> None:
        """Reserve and complete one key."""
        ...

    async def batch(self, keys: Sequence[str]) -> None:
        """Reserve and complete many keys, as fast as the driver can."""
        ...


class Store:
    """A store of this library, called through its Protocol."""

    def __init__(self, repository: IdempotencyRepository) -> None:
        self._repository = repository

    async def pair(self, key: str) -> None:
        await self.batch([key])

    async def batch(self, keys: Sequence[str]) -> None:
        verdicts = await self._repository.reserve([_request(key) for key in keys])
        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        completed = await self._repository.complete(
            [Completion(reservation=reservation, ttl=TTL, result=StoredResult(RESULT)) for reservation in reserved]
        )
        ensure(len(reserved) == len(keys) and all(completed), "not all were reserved and completed")


class Manager:
    """The same store behind an `IdempotencyManager`, as in a worker: concurrent calls are combined."""

    def __init__(self, repository: IdempotencyRepository) -> None:
        config = IdempotencyConfig(default_ttl_seconds=TTL.total_seconds(), processing_timeout_seconds=30)
        self._manager = IdempotencyManager(config, repository, scope="bench")

    async def pair(self, key: str) -> None:
        await self._manager.run(key, _work)

    async def batch(self, keys: Sequence[str]) -> None:
        raise NotImplementedError("the manager forms its batches itself")


async def _work() -> dict[str, str]:
    return {"receipt": "receipt-1"}


def _request(key: str) -> ReserveRequest:
    return ReserveRequest(key=key, token=new_token(), lease=LEASE, retention=RETENTION, owner="bench")


def ensure(condition: object, message: str) -> None:
    """Raise AssertionError unless `condition`: a contestant that does not do its work is not measured."""
    if not condition:
        raise AssertionError(message)
