"""A store that fails, loses answers, hangs or rejects calls, by operation: reserve, renew, complete, …

store = FlakyStore(MemoryIdempotencyRepository())
store.fail_next("complete", times=2)         # neither executed nor answered
store.lose_answer("reserve")            # executed, but the answer is lost
with store.outage(): ...                # no call is answered
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, TypeVar

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
from integr8s_idem.stores import NO_DELAY, IdempotencyRepository

T = TypeVar("T")

VERBS: Final = frozenset({"reserve", "renew", "complete", "fail", "release", "get", "delete", "count_active", "ping"})


class FlakyStore:
    """Passes calls on to `inner`, except for the configured failures."""

    def __init__(self, inner: IdempotencyRepository) -> None:
        self.inner = inner
        self.down: set[str] = set()
        """Operations that are neither executed nor answered."""
        self.failures: Counter[str] = Counter()
        """How many of the next calls of an operation are neither executed nor answered."""
        self.lose_answers: Counter[str] = Counter()
        """How many of the next calls of an operation are executed without an answer."""
        self.held: dict[str, asyncio.Event] = {}
        """Operations that wait for an event before they are executed."""
        self.refusal: Exception | None = None
        """The error of calls without an answer, instead of `StoreUnavailableError`."""
        self.calls: Counter[str] = Counter()
        self.requests: list[ReserveRequest] = []

    def fail_next(self, verb: str, times: int = 1) -> None:
        """Make the next calls of `verb` fail without being executed, as if the store were unreachable."""
        self.failures[_known(verb)] += times

    def lose_answer(self, verb: str, times: int = 1) -> None:
        """Execute the next calls of `verb`, but lose their answers."""
        self.lose_answers[_known(verb)] += times

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Make all calls fail inside the block."""
        before, self.down = self.down, set(VERBS)
        try:
            yield
        finally:
            self.down = before

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        self.calls[verb] += 1
        silent = verb in self.down
        if verb in self.held:
            await self.held[verb].wait()
        if not silent and self.failures[verb] > 0:
            self.failures[verb] -= 1
            silent = True
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

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        return await self._call("release", lambda: self.inner.release(reservations, delay=delay, retention=retention))

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


def _known(verb: str) -> str:
    if verb not in VERBS:
        raise ValueError(f"unknown store operation {verb!r}; known are {', '.join(sorted(VERBS))}")
    return verb
