"""Managers on a store with virtual time, and functions for them to run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from os import urandom
from typing import Any

from integr8s_idem._util.lease_clock import Clock
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Attempt
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyRecord, Reserved, ReserveRequest
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.telemetry.composite import combined
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_now
from tests.support.counting import CountingObserver

LEASE = 30.0
"""Seconds."""


def virtual_store() -> FlakyStore:
    return FlakyStore(MemoryIdempotencyRepository(clock=virtual_now))


@dataclass(slots=True)
class Guarded:
    """A manager with its store and observer."""

    manager: IdempotencyManager
    store: FlakyStore
    observer: CountingObserver

    async def record(self, key: str = "order:1") -> IdempotencyRecord:
        record = await self.manager.get(key)
        assert record is not None
        return record

    async def is_free(self, key: str = "order:1") -> bool:
        """Whether the key is free, after pending background writes."""
        await self.manager.close()
        return await self.store.count_active(self.manager.space.full(Key.of(key))) == 0

    async def leave_crashes(self, *keys: str, times: int, alone: bool = False) -> None:
        """Leave records of processes that died while they held `keys`, which are full keys."""
        for _ in range(times):
            lease, retention = timedelta(seconds=LEASE), timedelta(hours=2)
            requests = [
                ReserveRequest(key=key, token=urandom(16), lease=lease, retention=retention, alone=alone)
                for key in keys
            ]
            assert all(isinstance(verdict, Reserved) for verdict in await self.store.reserve(requests))
            await asyncio.sleep(LEASE + 1)


def guarded(
    store: FlakyStore | None = None,
    *,
    scope: str = "billing",
    owner: str | None = None,
    observer: Observer = SILENT,
    clock: Clock | None = None,
    **config: Any,
) -> Guarded:
    """Create a manager with virtual time; pass the store of another one to share it.

    `observer` observes in addition to the one that counts.  `clock`: the lease clock, if it is not the virtual one.
    """
    store = store or virtual_store()
    counting = CountingObserver()
    settings = IdempotencyConfig(**{"processing_timeout_seconds": LEASE, **config})
    observers = combined(observer, counting)
    return Guarded(
        IdempotencyManager(settings, store, observers, scope=scope, owner=owner, clock=clock), store, counting
    )


def plain_manager(**config: Any) -> IdempotencyManager:
    """Create a manager with its own store, in real time."""
    return IdempotencyManager(IdempotencyConfig(**config), MemoryIdempotencyRepository(), scope="billing")


@dataclass(slots=True)
class Job:
    """A function that counts its runs and has a configurable outcome."""

    result: Any = "receipt-1"
    seconds: float = 0.0
    errors: list[BaseException] = field(default_factory=list)
    """Errors that the first runs raise, one each."""
    runs: int = 0
    finished: int = 0
    attempts: list[Attempt] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self) -> Any:
        self.runs += 1
        self.started.set()
        await asyncio.sleep(self.seconds)
        if self.errors:
            raise self.errors.pop(0)
        self.finished += 1
        return self.result

    @property
    def with_attempt(self) -> Callable[[Attempt], Awaitable[Any]]:
        """Return a function for `execute`, which passes the attempt."""

        async def call(attempt: Attempt) -> Any:
            self.attempts.append(attempt)
            return await self()

        return call
