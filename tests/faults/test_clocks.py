"""Clocks that are wrong, jump or stop: leases and ttls use the store's clock, deadlines the monotonic clock.

The store is in memory in the tests of a suspended machine (row 79); the other tests use a real Redis.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from redis.asyncio import Redis

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import LeaseLostError, UndecodableEventError
from integr8s_idem.events import BaseEvent, EventDecoder
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import Key
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.records import IdempotencyStatus, InProgress, Previous, Reserved
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_now, virtual_time
from tests.support.clocks import WrongClock
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.guarded import LEASE, Job, guarded
from tests.support.redis import RedisServer

HOUR = 3600.0


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


# Workers with wrong clocks.


class Contenders:
    """Processes that compete for the same work, each with its own clock."""

    LEASE = 1.0

    def __init__(self, url: str, folder: Path) -> None:
        self.effects = Effects(folder)
        self.effects.prepare()
        self._arguments = (url, str(folder), str(self.LEASE))
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, clock: WrongClock, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.contender", *self._arguments, str(seconds)]
        environment = {**os.environ, **clock.environment}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._processes.append(process)
        return process

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def contenders(redis_url: str, tmp_path: Path) -> Iterator[Contenders]:
    contenders = Contenders(redis_url, tmp_path)
    yield contenders
    contenders.stop()


def wrong_clocks(folder: Path) -> list[WrongClock]:
    """Return clocks that are an hour fast, an hour slow, and stopped."""
    clocks = [WrongClock(folder, HOUR), WrongClock(folder, -HOUR), WrongClock(folder)]
    clocks[2].stop()
    return clocks


@pytest.mark.scenario(77)
def test_workers_with_wrong_clocks_run_work_longer_than_its_lease_once(contenders: Contenders, tmp_path: Path) -> None:
    clocks, now = wrong_clocks(tmp_path), time.time()
    processes = [contenders.start(clock, seconds=2.5 * Contenders.LEASE) for clock in clocks]

    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]

    assert [round((float(wall) - now) / HOUR) for wall, _ in outputs] == [1, -1, 0]
    assert len({result for _, result in outputs}) == 1
    assert [effect.attempt for effect in contenders.effects.lines()] == [1, 1]
    assert contenders.effects.judge({"order:1"})["repeats"] == 0


@pytest.mark.scenario(77)
async def test_the_work_of_a_dead_worker_with_a_stopped_clock_is_taken_over_when_its_lease_ends(
    contenders: Contenders, tmp_path: Path
) -> None:
    fast, slow, stopped = wrong_clocks(tmp_path)
    doomed = contenders.start(stopped, seconds=HOUR)
    await eventually(contenders.effects.lines)
    successors = [contenders.start(clock, seconds=0) for clock in (fast, slow)]
    for successor in successors:
        assert successor.stdout is not None
        assert await asyncio.to_thread(successor.stdout.readline)

    doomed.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    await eventually(contenders.effects.done)
    took = time.monotonic() - killed_at

    # The lease is renewed after a third of it, so that at least two thirds were left.
    assert Contenders.LEASE / 2 < took < Contenders.LEASE + 3
    results = {(await asyncio.to_thread(successor.communicate))[0] for successor in successors}
    assert len(results) == 1
    assert contenders.effects.judge({"order:1"})["repeats"] == 0


# A store whose clock jumps.


class JumpingRedis:
    """A Redis whose clock can be moved."""

    def __init__(self, server: RedisServer, clock: WrongClock, client: Redis) -> None:
        self.server = server
        self.clock = clock
        self.store = RedisIdempotencyRepository(client)

    def manager(self) -> IdempotencyManager:
        return IdempotencyManager(IdempotencyConfig(processing_timeout_seconds=30), self.store, scope="billing")

    async def reserve(self) -> Reserved:
        verdict = await self.manager().reserve("order:1")
        assert isinstance(verdict, Reserved)
        return verdict


@pytest.fixture
async def jumping(tmp_path: Path) -> AsyncIterator[JumpingRedis]:
    clock = WrongClock(tmp_path)
    with clock.installed():
        server = RedisServer()
        server.start()
    client = server.client()
    yield JumpingRedis(server, clock, client)
    await client.aclose()
    server.stop()


@pytest.mark.scenario(78)
async def test_a_forward_jump_of_the_store_clock_allows_an_early_takeover_and_rejects_stale_writes(
    jumping: JumpingRedis,
) -> None:
    first = await jumping.reserve()

    jumping.clock.jump(60)
    second = await jumping.reserve()

    assert (second.attempt, second.previous) == (2, Previous.LAPSED)
    assert second.fence > first.fence + 50_000_000
    assert not await jumping.manager().complete(first, "stale")
    assert await jumping.manager().renew(first) == [False]
    assert await jumping.manager().complete(second, "receipt-2")


@pytest.mark.scenario(78)
async def test_fences_grow_when_a_forward_jump_of_an_hour_expires_the_record(
    jumping: JumpingRedis,
) -> None:
    first = await jumping.reserve()

    # Records are kept for an hour; exactly at the limit, this one would still exist.
    jumping.clock.jump(HOUR + 1)
    second = await jumping.reserve()

    assert (second.attempt, second.previous) == (1, Previous.NONE)
    assert second.fence > first.fence
    assert not await jumping.manager().complete(first, "stale")


@pytest.mark.scenario(78)
async def test_a_backward_jump_of_the_store_clock_allows_no_early_takeover_and_fences_grow(
    jumping: JumpingRedis,
) -> None:
    first = await jumping.reserve()

    jumping.clock.jump(-HOUR)
    found = await jumping.manager().reserve("order:1")
    assert isinstance(found, InProgress)
    assert found.retry_after > timedelta(minutes=59)
    assert await jumping.manager().renew(first) == [True]
    renewed = await jumping.manager().reserve("order:1")
    assert isinstance(renewed, InProgress)
    assert renewed.retry_after <= timedelta(seconds=30)
    await jumping.manager().release(first)
    second = await jumping.reserve()

    assert (second.attempt, second.fence) == (2, first.fence + 1)
    assert not await jumping.manager().complete(first, "stale")


# A machine that was suspended: its monotonic clock stopped, but the store's clock did not.


@pytest.mark.scenario(79)
@virtual_time
async def test_a_handler_on_a_resumed_machine_is_cancelled_and_its_writes_are_rejected() -> None:
    asleep = timedelta(0)
    store = FlakyStore(MemoryIdempotencyRepository(clock=lambda: virtual_now() + asleep))
    suspended, here = guarded(store), guarded(store)
    job = Job(seconds=1000, result="of the suspended worker")
    running = asyncio.create_task(suspended.manager.run("order:1", job))
    await job.started.wait()

    asleep = timedelta(seconds=2 * LEASE)
    assert await here.manager.run("order:1", Job(result="of the successor")) == "of the successor"

    with pytest.raises(LeaseLostError):
        await running
    assert asyncio.get_running_loop().time() <= LEASE / 2
    assert job.finished == 0
    record = await here.record()
    assert (record.attempt, record.result and record.result.body) == (2, b'"of the successor"')


@pytest.mark.scenario(79)
@virtual_time
async def test_work_that_ends_right_after_a_resume_is_rejected() -> None:
    asleep = timedelta(0)
    store = FlakyStore(MemoryIdempotencyRepository(clock=lambda: virtual_now() + asleep))
    suspended, here, job = guarded(store), guarded(store), Job(seconds=1)
    running = asyncio.create_task(suspended.manager.execute(Work(Key.of("order:1")), job.with_attempt))
    await job.started.wait()

    asleep = timedelta(seconds=2 * LEASE)
    taken = await here.manager.reserve("order:1")
    assert isinstance(taken, Reserved)

    with pytest.raises(LeaseLostError):
        await running
    assert (await here.record()).status is IdempotencyStatus.PROCESSING
    assert await here.manager.complete(taken, "of the successor")


# Event timestamps and time zones.


@pytest.mark.scenario(80)
@pytest.mark.parametrize(
    "timestamp",
    [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC)],
)
async def test_the_ttl_does_not_depend_on_the_event_timestamp(redis_client: Redis, timestamp: datetime) -> None:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None: ...

    event = OrderPlaced(timestamp=timestamp)
    manager = IdempotencyManager(repository=RedisIdempotencyRepository(redis_client), scope="billing")
    await IdempotentEventDispatcher(router, manager).dispatch(event)

    record = await manager.get(KeyResolver().resolve("charge", event).key)
    assert record is not None
    assert record.settled_at is not None
    assert record.expires_at is not None
    assert abs(datetime.now(UTC) - record.settled_at) < timedelta(seconds=10)
    assert abs(record.expires_at - record.settled_at - manager.config.ttl) < timedelta(seconds=10)
    await manager.close()


@pytest.mark.scenario(80)
def test_an_event_with_a_naive_timestamp_is_rejected() -> None:
    message = b'{"event_type": "order_placed", "event_id": "1", "timestamp": "2026-03-29T02:30:00"}'

    with pytest.raises(UndecodableEventError, match="timestamp"):
        EventDecoder([OrderPlaced]).decode(message)


@pytest.mark.scenario(80)
@pytest.mark.parametrize("hemisphere", ["America/New_York", "Australia/Lord_Howe"])
async def test_records_do_not_depend_on_the_local_time_zone(
    redis_client: Redis, monkeypatch: pytest.MonkeyPatch, hemisphere: str
) -> None:
    store = RedisIdempotencyRepository(redis_client)
    times = []
    for zone in ("UTC", hemisphere):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        manager = IdempotencyManager(repository=store, scope=zone)
        await manager.run("order:1", Job())
        record = await manager.get("order:1")
        await manager.close()
        assert record is not None
        times.append((record.settled_at, record.expires_at))
    monkeypatch.undo()
    time.tzset()

    (first, first_expiry), (second, second_expiry) = times
    assert first is not None
    assert second is not None
    assert first.tzinfo is second.tzinfo is UTC
    assert abs(second - first) < timedelta(seconds=10)
    assert first_expiry is not None
    assert second_expiry is not None
    assert abs(second_expiry - first_expiry) < timedelta(seconds=10)
