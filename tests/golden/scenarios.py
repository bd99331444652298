"""One record in each form that a version writes, made by the operations of a store."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from integr8s_idem.engine.step_slots import mark_of
from integr8s_idem.events import BaseEvent
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.keys.fingerprints import content_hash, fingerprint, fingerprint_of
from integr8s_idem.records import Completion, Failure, InProgress, Reserved, ReserveRequest, StoredResult, TraceLink
from integr8s_idem.stores import IdempotencyRepository

PREFIX: Final = "golden:billing:"
OWNER: Final = "billing@höst-7"
TRACE: Final = TraceLink(bytes(range(16)), bytes(range(16, 24)))
LATER_TRACE: Final = TraceLink(bytes(range(32, 48)), bytes(range(48, 56)))
WHOLE: Final = fingerprint(b"the body of a request")
BY_FIELDS: Final = b"\x81set" + bytes(range(12))

# So long that the records are valid when a test reads them years later.
LEASE: Final = timedelta(days=15_000)
RETENTION: Final = timedelta(days=30_000)

State = Literal["running", "lapsed", "released", "scheduled", "completed", "failed", "deleted"]


@dataclass
class Life:
    """The life of one record, which its methods continue."""

    store: IdempotencyRepository
    key: str
    held: Reserved | None = None
    tokens: list[bytes] = field(default_factory=list)

    async def reserve(self, *, lapses: bool = False, same_token: bool = False, **options: Any) -> Reserved:
        if not same_token:
            self.tokens.append(hashlib.sha256(f"{self.key} {len(self.tokens)}".encode()).digest()[:16])
        request = ReserveRequest(
            key=self.key,
            token=self.tokens[-1],
            lease=timedelta(0) if lapses else LEASE,
            retention=RETENTION,
            **{"owner": OWNER, **options},
        )
        deadline = time.monotonic() + 10
        while isinstance(verdict := (await self.store.reserve([request]))[0], InProgress):
            # The clock of DynamoDB, in whole seconds, is still where it was when a lease without length began.
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        assert isinstance(verdict, Reserved), verdict
        self.held = verdict
        return verdict

    @property
    def reservation(self) -> Reserved:
        assert self.held is not None
        return self.held

    async def renew(self) -> None:
        assert await self.store.renew([self.reservation], LEASE) == [True]

    async def release(self) -> None:
        assert await self.store.release([self.reservation]) == [True]

    async def schedule(self) -> None:
        assert await self.store.release([self.reservation], delay=LEASE, retention=RETENTION) == [True]

    async def complete(self, result: StoredResult | None = None, *, dropped: bool = False) -> None:
        done = Completion(reservation=self.reservation, ttl=RETENTION, result=result, result_dropped=dropped)
        assert await self.store.complete([done]) == [True]

    async def fail(self, error: str) -> None:
        assert await self.store.fail([Failure(reservation=self.reservation, ttl=RETENTION, error=error)]) == [True]


@dataclass(frozen=True)
class Scenario:
    """How a record is made, and the state that it is in afterwards."""

    state: State
    make: Callable[[Life], Awaitable[None]]
    suffix: str = ""
    """End of its key."""


SCENARIOS: dict[str, Scenario] = {}


def scenario(state: State, suffix: str = "") -> Callable[[Callable[[Life], Awaitable[None]]], None]:
    def add(make: Callable[[Life], Awaitable[None]]) -> None:
        SCENARIOS[make.__name__] = Scenario(state, make, suffix)

    return add


def key_of(name: str) -> str:
    return f"{PREFIX}{name}{SCENARIOS[name].suffix}"


async def make_all(store: IdempotencyRepository) -> dict[str, Life]:
    """Make the record of each scenario in an empty store."""
    lives = {name: Life(store, key_of(name)) for name in SCENARIOS}
    for name, life in lives.items():
        await SCENARIOS[name].make(life)
    return lives


@scenario("running")
async def running(life: Life) -> None:
    await life.reserve()


@scenario("running")
async def running_without_owner(life: Life) -> None:
    await life.reserve(owner="")


@scenario("running")
async def running_with_payload(life: Life) -> None:
    await life.reserve(fingerprint=WHOLE)


@scenario("running")
async def running_with_trace(life: Life) -> None:
    await life.reserve(trace=TRACE)


@scenario("running")
async def running_with_fields_and_trace(life: Life) -> None:
    await life.reserve(fingerprint=BY_FIELDS, trace=TRACE)


@scenario("running")
async def running_alone(life: Life) -> None:
    await life.reserve(alone=True, fingerprint=BY_FIELDS)


@scenario("running")
async def running_renewed(life: Life) -> None:
    await life.reserve(lapses=True, fingerprint=BY_FIELDS)
    await life.renew()


@scenario("running")
async def running_after_a_repeated_request(life: Life) -> None:
    await life.reserve(lapses=True, fingerprint=BY_FIELDS)
    await life.reserve(same_token=True, fingerprint=BY_FIELDS)


@scenario("running")
async def running_after_a_release(life: Life) -> None:
    await life.reserve(trace=TRACE)
    await life.release()
    await life.reserve(trace=LATER_TRACE)


@scenario("running")
async def running_after_a_lapse(life: Life) -> None:
    await life.reserve(lapses=True, fingerprint=BY_FIELDS, trace=TRACE)
    await life.reserve(fingerprint=BY_FIELDS)


@scenario("running")
async def running_alone_after_lapses(life: Life) -> None:
    await life.reserve(lapses=True)
    await life.reserve(lapses=True, alone=True)
    await life.reserve(alone=True, fingerprint=WHOLE, trace=TRACE)


@scenario("lapsed")
async def lapsed(life: Life) -> None:
    await life.reserve(lapses=True, fingerprint=BY_FIELDS)


@scenario("lapsed")
async def lapsed_with_trace(life: Life) -> None:
    await life.reserve(lapses=True, fingerprint=BY_FIELDS, trace=TRACE)


@scenario("lapsed")
async def lapsed_alone_for_the_second_time(life: Life) -> None:
    await life.reserve(lapses=True, alone=True)
    await life.reserve(lapses=True, alone=True)


@scenario("released")
async def released(life: Life) -> None:
    await life.reserve(fingerprint=BY_FIELDS, trace=TRACE)
    await life.release()


@scenario("released")
async def released_after_a_lapse(life: Life) -> None:
    await life.reserve(lapses=True)
    await life.reserve()
    await life.release()


@scenario("scheduled")
async def scheduled(life: Life) -> None:
    await life.reserve(fingerprint=BY_FIELDS, trace=TRACE)
    await life.schedule()


@scenario("scheduled")
async def scheduled_after_a_lapse(life: Life) -> None:
    await life.reserve(lapses=True)
    await life.reserve(alone=True)
    await life.schedule()


@scenario("completed")
async def completed_without_result(life: Life) -> None:
    await life.reserve()
    await life.complete()


@scenario("completed")
async def completed_with_null(life: Life) -> None:
    await life.reserve(fingerprint=BY_FIELDS)
    await life.complete(StoredResult(b"null"))


@scenario("completed")
async def completed_with_json(life: Life) -> None:
    await life.reserve(fingerprint=BY_FIELDS, trace=TRACE)
    await life.complete(StoredResult(b'{"receipt": 1}'))


@scenario("completed")
async def completed_with_an_empty_body(life: Life) -> None:
    await life.reserve(fingerprint=WHOLE)
    await life.complete(StoredResult(b""))


@scenario("completed")
async def completed_with_another_type(life: Life) -> None:
    await life.reserve(fingerprint=WHOLE, trace=TRACE)
    await life.complete(StoredResult(bytes(range(256)), "application/octet-stream"))


@scenario("completed")
async def completed_with_a_dropped_result(life: Life) -> None:
    await life.reserve(fingerprint=WHOLE)
    await life.complete(dropped=True)


@scenario("completed")
async def completed_by_the_third_attempt(life: Life) -> None:
    await life.reserve(lapses=True, alone=True)
    await life.reserve()
    await life.release()
    await life.reserve(fingerprint=BY_FIELDS)
    await life.complete(StoredResult(b"3"))


@scenario("completed", ";1")
async def completed_in_generation_1(life: Life) -> None:
    await life.reserve(fingerprint=BY_FIELDS)
    await life.complete(StoredResult(b"null"))


@scenario("completed", ";s0")
async def completed_step(life: Life) -> None:
    await life.reserve(fingerprint=mark_of("reserve"))
    await life.complete(StoredResult(b"[1]", "application/json; step=reserve"))


@scenario("failed")
async def failed(life: Life) -> None:
    await life.reserve(fingerprint=BY_FIELDS)
    await life.fail("ValueError: no such account: Zoë \N{SNOWMAN}")


@scenario("failed")
async def failed_with_trace_after_a_lapse(life: Life) -> None:
    await life.reserve(lapses=True)
    await life.reserve(trace=TRACE)
    await life.fail("")


@scenario("deleted")
async def deleted(life: Life) -> None:
    """Some stores keep the fence."""
    await life.reserve(fingerprint=BY_FIELDS)
    assert await life.store.delete([life.key]) == 1


class _Line(BaseEvent):
    event_type: Literal["golden_line"] = "golden_line"
    sku: str = "a-1"


class _Order(BaseEvent):
    event_type: Literal["golden_order"] = "golden_order"
    number: int = 7
    note: str | None = None
    lines: tuple[_Line, ...] = ()


def keys_and_fingerprints() -> dict[str, str]:
    """Return what a version makes of events and of callers' keys; another version must make the same."""
    space = KeySpace("idempotency", "billing")
    plain = _Line(event_id="1")
    nested = _Order(event_id="2", lines=(_Line(event_id="3", timestamp=datetime(2026, 1, 1, tzinfo=UTC)),))
    resolved = {
        f"{type(event).__name__} {strategy.value}": space.full(KeyResolver(strategy).resolve("charge", event).key)
        for event in (plain, nested)
        for strategy in (KeyStrategy.EVENT_BASED, KeyStrategy.CONTENT_HASH)
    }
    return resolved | {
        "caller": space.full(Key.of("order:1 ü/é")),
        "step": space.full(space.step(space.full(Key.of("order:1")), "reserve", 3)),
        "generation": space.full(Key.of("order:1").in_generation(2)),
        "plain event": fingerprint_of(plain).hex(),
        "nested event": fingerprint_of(nested).hex(),
        "content": content_hash(nested),
        "body": fingerprint(b"{}").hex(),
        "name of a step": mark_of("reserve").hex(),
    }
