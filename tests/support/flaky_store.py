"""A store that can be silent, lose answers, hang or refuse us, by the name of the verb."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import (
    Completion,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import IdempotencyRepository

T = TypeVar("T")


class FlakyStore:
    """Hands everything on to `inner`, unless told otherwise."""

    def __init__(self, inner: IdempotencyRepository) -> None:
        self.inner = inner
        self.down: set[str] = set()
        """Verbs that are not executed and not answered."""
        self.lose_answers: Counter[str] = Counter()
        """How many of the next calls of a verb are executed without an answer."""
        self.held: dict[str, asyncio.Event] = {}
        """Verbs that wait for an event before they are executed."""
        self.refusal: Exception | None = None
        """What a silent verb raises, instead of `StoreUnavailableError`."""
        self.calls: Counter[str] = Counter()
        self.requests: list[ReserveRequest] = []

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls[verb] += 1
        silent = verb in self.down
        if verb in self.held:
            await self.held[verb].wait()
        if silent:
            raise self.refusal or StoreUnavailableError(verb, "switched off by the test")
        answer = await call()
        if self.lose_answers[verb] > 0:
            self.lose_answers[verb] -= 1
            raise StoreUnavailableError(verb, "its answer was lost")
        return answer

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        self.requests.extend(requests)
        return await self._call("reserve", lambda: self.inner.reserve(requests))

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        return await self._call("renew", lambda: self.inner.renew(reservations, lease))

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return await self._call("complete", lambda: self.inner.complete(completions))

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return await self._call("fail", lambda: self.inner.fail(failures))

    async def release(self, reservations: Sequence[Reserved]) -> list[bool]:
        return await self._call("release", lambda: self.inner.release(reservations))

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        return await self._call("get", lambda: self.inner.get(keys))

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._call("delete", lambda: self.inner.delete(keys))

    def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        return self.inner.scan(prefix)

    async def count_active(self, prefix: str) -> int:
        return await self._call("count_active", lambda: self.inner.count_active(prefix))

    async def ping(self) -> StoreHealth:
        return await self._call("ping", lambda: self.inner.ping())
