"""The real in-memory store behind a simulated network; every transition is checked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeVar

from integr8s_idem.engine.results import discarded_error
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import (
    NOBODY,
    Completed,
    Completion,
    Failure,
    IdempotencyRecord,
    IdempotencyStatus,
    Reserved,
    ReserveRequest,
    StoredResult,
    StoreHealth,
    Verdict,
)
from integr8s_idem.stores import NO_DELAY
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.testing.virtual_time import EPOCH
from tests.simulation.history import History
from tests.simulation.network import Network, SilenceError
from tests.simulation.processes import PROCESS, Process

T = TypeVar("T")

TIMEOUT: Final = 0.5
"""Timeout of a client in seconds."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The relevant fields of a record at some time."""

    status: IdempotencyStatus
    attempt: int
    fence: int
    token: bytes
    lease_until: datetime | None
    result: StoredResult | None

    @property
    def open(self) -> bool:
        return self.status is IdempotencyStatus.PROCESSING


def at_once(work: Awaitable[T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        work.__await__().send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise RuntimeError("the coroutine suspended")


class Server:
    """The store. Checks that the protocol allows every transition."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.inner = MemoryIdempotencyRepository(clock=self.now)
        self.offset = 0.0
        """Seconds by which its clock is ahead."""
        self.down = False
        self.asker_is_ahead = 0.0
        """Seconds by which the clock of the caller is ahead; only used by an injected bug."""
        history.store_time = self.now
        self.expires = False
        """Whether records expire within a run, because the ttl is short; each one then counts as lost."""
        self._highest: dict[str, int] = {}
        self._results: dict[str, StoredResult | None] = {}

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=100 + asyncio.get_running_loop().time() + self.offset)

    def seen(self, key: str) -> Seen | None:
        entry = self.inner._entries.get(key)
        if entry is None or entry.expires_at <= self.now():
            return None
        return Seen(entry.status, entry.attempt, entry.fence, entry.token, entry.lease_until, entry.result)

    def keys(self) -> list[str]:
        return list(self.inner._entries)

    def lose(self, keys: Sequence[str]) -> None:
        """Lose records, as by eviction, a flush or a failover."""
        for key in keys:
            if self.inner._entries.pop(key, None) is not None:
                self._history.truth.losses[key] += 1
                self._history.note("record lost", key)

    def scheduled_keys(self) -> list[str]:
        return [key for key, entry in self.inner._entries.items() if entry.token == NOBODY and entry.lease_until]

    def _note_expiry(self, key: str) -> None:
        entry = self.inner._entries.get(key)
        if not self.expires or entry is None or entry.expires_at > self.now():
            return
        if entry.token == NOBODY and entry.lease_until is not None and entry.lease_until > self.now():
            self._history.violate("B", f"the record of {key} expires before the event is due")
        elif entry.lease_until is None or entry.lease_until <= self.now():
            self._history.note("record expired", key)
            self._history.truth.losses[key] += 1

    # Transitions

    def reserve(self, request: ReserveRequest) -> Verdict:
        self._note_expiry(request.key)
        before, now = self.seen(request.key), self.now()
        verdict = at_once(self.inner.reserve([request]))[0]
        self._history.note("reserve", request.key, request.owner, type(verdict).__name__)
        if isinstance(verdict, Reserved):
            self._check_reserved(request, before, verdict, now)
        elif before is not None and _own(before, request.token) and before.lease_until is not None:
            self._history.violate("R", f"a repeated reserve of {request.key} does not find its own reservation")
        elif isinstance(verdict, Completed) and verdict.result != self._results.get(request.key):
            self._history.violate("D", f"{request.key} is answered with a result of another run")
        return verdict

    def _check_reserved(self, request: ReserveRequest, before: Seen | None, verdict: Reserved, now: datetime) -> None:
        complain, key = self._history.violate, request.key
        self._history.truth.granted.setdefault((key, verdict.fence), self._history.truth.excuses(key))
        if before is not None and _own(before, request.token) and before.lease_until is not None:
            if (verdict.attempt, verdict.fence) != (before.attempt, before.fence):
                complain("R", f"a repeated reserve of {key} returns another reservation")
            return
        if before is not None and not before.open:
            complain("T", f"{key} was {before.status.value} and is reserved")
        if before is not None and before.lease_until is not None and before.lease_until > now:
            complain("T", f"{key} is reserved while another lease holds")
        if verdict.attempt != (before.attempt + 1 if before is not None else 1):
            complain("T", f"{key} is at attempt {verdict.attempt} after {before}")
        if verdict.fence <= self._highest.get(key, 0):
            complain("T", f"the fence of {key} does not grow")
        self._highest[key] = verdict.fence
        if before is not None and before.lease_until is not None:
            self._history.counts["takeovers"] += 1

    def renew(self, reserved: Reserved, lease: timedelta) -> bool:
        return self._write("renew", reserved, lambda: self.inner.renew([reserved], lease))

    def complete(self, completion: Completion) -> bool:
        reserved = completion.reservation
        answer = self._write("complete", reserved, lambda: self.inner.complete([completion]))
        if answer:
            after = self.seen(reserved.key)
            if reserved.key not in self._history.truth.completed or after is None or after.fence == reserved.fence:
                self._results[reserved.key] = completion.result
            is_discarded = discarded_error(completion.result) is not None
            self._history.complete(reserved.key, reserved.fence, discarded=is_discarded)
        return answer

    def fail(self, failure: Failure) -> bool:
        return self._write("fail", failure.reservation, lambda: self.inner.fail([failure]))

    def release(self, reserved: Reserved, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY) -> bool:
        answer = self._write(
            "release", reserved, lambda: self.inner.release([reserved], delay=delay, retention=retention)
        )
        if answer:
            released = self._history.truth.released
            if delay and (reserved.key, reserved.fence) not in released:
                self._history.schedule(reserved.key, self.now() + delay)
            released.add((reserved.key, reserved.fence))
        return answer

    def _write(self, verb: str, reserved: Reserved, write: Callable[[], Awaitable[list[bool]]]) -> bool:
        self._note_expiry(reserved.key)
        before = self.seen(reserved.key)
        answer = at_once(write())[0]
        after = self.seen(reserved.key)
        self._history.note(verb, reserved.key, reserved.attempt, answer)
        if after != before:
            is_owned = before is not None and (before.token, before.fence) == (reserved.token, reserved.fence)
            if not is_owned:
                self._history.violate("T", f"{verb} of {reserved.key} by attempt {reserved.attempt} changed {before}")
            elif before is not None and not before.open:
                self._history.violate("T", f"{verb} of {reserved.key} changed a record that was {before.status.value}")
            elif after is None:
                self._history.violate("T", f"{verb} of {reserved.key} deleted the record")
        return answer


def _own(before: Seen, token: bytes) -> bool:
    return before.open and before.token == token


class SimulatedStoreClient:
    """The `IdempotencyRepository` of a process."""

    def __init__(self, server: Server, network: Network, ahead: float) -> None:
        """Create a client; the wall clock of its process is `ahead` seconds ahead."""
        process = PROCESS.get()
        assert process is not None
        self.server = server
        self._process: Process = process
        self._network = network
        self._ahead = ahead
        self.when_reserved: Callable[[], None] | None = None
        """Called once, after the answer to the next reservation and before it is processed."""
        self.when_scheduled: Callable[[], None] | None = None
        """Called once, after the answer to the next release with a delay."""
        self.on_schedule: Callable[[Process, str], None] = lambda process, key: None
        """Called for each release with a delay that was confirmed."""

    async def _call(self, verb: str, execute: Callable[[], T]) -> T:
        def executed() -> T:
            if self.server.down or self._process.cut_off:
                raise StoreUnavailableError(verb, "connection refused")
            self.server.asker_is_ahead = self._ahead
            return execute()

        try:
            return await self._network.ask(executed, TIMEOUT)
        except SilenceError:
            raise StoreUnavailableError(verb, "no answer") from None

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        verdicts = await self._call("reserve", lambda: [self.server.reserve(request) for request in requests])
        if self.when_reserved is not None and any(isinstance(verdict, Reserved) for verdict in verdicts):
            call, self.when_reserved = self.when_reserved, None
            call()
        return verdicts

    async def renew(self, reservations: Sequence[Reserved], lease: timedelta) -> list[bool]:
        return await self._call("renew", lambda: [self.server.renew(reserved, lease) for reserved in reservations])

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        return await self._call("complete", lambda: [self.server.complete(completion) for completion in completions])

    async def fail(self, failures: Sequence[Failure]) -> list[bool]:
        return await self._call("fail", lambda: [self.server.fail(failure) for failure in failures])

    async def release(
        self, reservations: Sequence[Reserved], *, delay: timedelta = NO_DELAY, retention: timedelta = NO_DELAY
    ) -> list[bool]:
        answers = await self._call(
            "release", lambda: [self.server.release(reserved, delay, retention) for reserved in reservations]
        )
        if delay:
            for reserved, answer in zip(reservations, answers, strict=True):
                if answer:
                    self.on_schedule(self._process, reserved.key)
            if self.when_scheduled is not None:
                call, self.when_scheduled = self.when_scheduled, None
                call()
        return answers

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        return await self._call("get", lambda: at_once(self.server.inner.get(keys)))

    async def delete(self, keys: Sequence[str]) -> int:
        return await self._call("delete", lambda: at_once(self.server.inner.delete(keys)))

    def scan(self, prefix: str) -> AsyncIterator[IdempotencyRecord]:
        return self.server.inner.scan(prefix)

    async def count_active(self, prefix: str) -> int:
        return await self._call("count_active", lambda: at_once(self.server.inner.count_active(prefix)))

    async def ping(self) -> StoreHealth:
        health = StoreHealth(kind="simulated", version="", latency=timedelta(0))
        return await self._call("ping", lambda: health)
