"""A running Redis that refuses requests: full, read-only, busy, or with changed credentials.

The broker is in memory (see `tests.support.redis_shop`); server, driver, store and worker are real.
`tests/integration/test_redis_store_errors.py` covers the same faults for each store call.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis as BlockingRedis
from redis.exceptions import RedisError

from integr8s_idem.errors import StoreConfigurationError
from tests.support.conditions import eventually
from tests.support.effects import Effects
from tests.support.processes import ServiceProcess
from tests.support.redis import RedisServer, needs_newer_binary
from tests.support.redis_shop import Held, RedisShop, open_redis_shop

SECRET = "hunter2-hunter2"


# Refused requests.


def full(server: RedisServer) -> None:
    server.admin("CONFIG", "SET", "maxmemory", 1)


def roomy(server: RedisServer) -> None:
    server.admin("CONFIG", "SET", "maxmemory", 0)


def cannot_save(server: RedisServer) -> None:
    """Make saving fail: there is a folder with the name of the snapshot."""
    (server.folder / "dump.rdb" / "full").mkdir(parents=True)
    server.admin("CONFIG", "SET", "save", "3600 1000000")
    server.admin("BGSAVE")
    until = time.monotonic() + 10
    while server.admin("INFO", "persistence")["rdb_last_bgsave_status"] != "err":
        assert time.monotonic() < until
        time.sleep(0.02)


def can_save(server: RedisServer) -> None:
    server.admin("CONFIG", "SET", "save", "")
    shutil.rmtree(server.folder / "dump.rdb")


def demoted(server: RedisServer) -> None:
    server.admin("REPLICAOF", "127.0.0.1", 1)


def promoted(server: RedisServer) -> None:
    server.admin("REPLICAOF", "NO", "ONE")
    server.admin("CONFIG", "SET", "replica-serve-stale-data", "yes")


def demoted_and_stale(server: RedisServer) -> None:
    server.admin("CONFIG", "SET", "replica-serve-stale-data", "no")
    server.admin("REPLICAOF", "127.0.0.1", 1)


def alone(server: RedisServer) -> None:
    server.admin("CONFIG", "SET", "min-replicas-to-write", 1)


def not_alone(server: RedisServer) -> None:
    server.admin("CONFIG", "SET", "min-replicas-to-write", 0)


Step = Callable[[RedisServer], None]
REFUSALS: dict[str, tuple[Step, Step, str]] = {
    "OOM": (full, roomy, "out of memory"),
    "MISCONF": (cannot_save, can_save, "cannot save to its disk"),
    "READONLY": (demoted, promoted, "read-only replica"),
    "MASTERDOWN": (demoted_and_stale, promoted, "lost its primary"),
    "NOREPLICAS": (alone, not_alone, "fewer replicas"),
}


@pytest.mark.scenario(48, 50)
@pytest.mark.parametrize("code", REFUSALS)
async def test_a_server_that_refuses_writes_pauses_the_worker(server: RedisServer, effects: Effects, code: str) -> None:
    spoil, restore, reason = REFUSALS[code]
    async with open_redis_shop(effects, server.address) as shop:
        shop.order(3)
        await shop.settled()
        try:
            await asyncio.to_thread(spoil, server)
            shop.order(10)
            assert reason in await shop.paused()
            # A successful ping is not enough to resume.
            assert not await _opens_within(shop, 1.0)
            assert len(shop.effects.done()) == 3
        finally:
            await asyncio.to_thread(restore, server)

        await shop.settled()

        shop.untouched()


async def _opens_within(shop: RedisShop, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if shop.state != "paused":
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.scenario(49, 50)
@pytest.mark.parametrize("code", REFUSALS)
async def test_refused_completions_are_repeated_until_the_server_accepts_them(
    server: RedisServer, effects: Effects, code: str
) -> None:
    spoil, restore, reason = REFUSALS[code]
    held = Held()
    async with open_redis_shop(effects, server.address, behave=held) as shop:
        events = shop.order(6)
        await eventually(lambda: len(held.began) == 6)
        try:
            await asyncio.to_thread(spoil, server)
            held.may_go_on.set()
            assert reason in await shop.paused()
            assert len(shop.effects.done()) == 6
            assert shop.acknowledged == 0
        finally:
            await asyncio.to_thread(restore, server)
        await shop.settled()

        shop.publish(*events)
        await shop.settled()

        assert shop.tally.duplicates == 6
        shop.untouched()


@pytest.mark.scenario(50)
async def test_a_worker_waits_for_a_server_that_runs_a_long_script(effects: Effects) -> None:
    with RedisServer(config={"lua-time-limit": "100"}) as server:
        async with open_redis_shop(effects, server.address) as shop:
            shop.order(3)
            await shop.settled()
            busy = asyncio.create_task(asyncio.to_thread(_run_endless_script, server))
            await asyncio.to_thread(_wait_until_busy, server)

            shop.order(10)
            assert "busy with a long-running script" in await shop.paused()
            await asyncio.to_thread(server.admin, "SCRIPT", "KILL")
            await busy
            await shop.settled()

            shop.untouched()


def _run_endless_script(server: RedisServer) -> None:
    with pytest.raises(RedisError, match="killed"):
        server.admin("EVAL", "while true do end", 0)


def _wait_until_busy(server: RedisServer) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            server.admin("PING")
        except RedisError:
            return
    raise AssertionError("the server did not become busy")


@pytest.mark.scenario(50)
async def test_a_worker_waits_for_a_server_that_loads_its_data(effects: Effects) -> None:
    # Redis serves its clients once per kilobyte, so each key must be large: loading a key takes two milliseconds.
    saving = {"save": ["3600", "1"], "rdbcompression": "no"}
    slowly = saving | {"key-load-delay": "2000", "loading-process-events-interval-bytes": "1024"}
    # Redis 6.2 does not support loading-process-events-interval-bytes.
    with RedisServer(binary=needs_newer_binary(), config=saving) as server:
        async with open_redis_shop(effects, server.address, timeout=2) as shop:
            shop.order(3)
            await shop.settled()
            await asyncio.to_thread(_fill, server, 2_000)
            server.kill()
            server.config.update(slowly)
            await asyncio.to_thread(server.start, loading=True)

            shop.order(10)
            # On a busy machine, the first ping may time out; the next one returns the reason.
            await eventually(lambda: "Redis is loading its data" in shop.reason, state=shop.snapshot)
            assert shop.state == "paused"
            await shop.settled()

            shop.untouched()


def _fill(server: RedisServer, keys: int) -> None:
    with BlockingRedis.from_url(server.url) as client:
        client.mset({f"other:{number}": "x" * 1024 for number in range(keys)})
        client.save()


# Refused credentials.


@asynccontextmanager
async def worker_user(server: RedisServer, rules: str = "~* +@all") -> AsyncIterator[dict[str, str]]:
    """Create the user `worker` for the block, and return its credentials."""
    await _set_user(server, rules)
    yield {"username": "worker", "password": SECRET}
    await asyncio.to_thread(server.admin, "ACL", "DELUSER", "worker")


async def _set_user(server: RedisServer, rules: str, password: str = SECRET) -> None:
    command = f"ACL SETUSER worker reset on >{password} resetkeys -@all {rules}"
    await asyncio.to_thread(server.admin, *command.split())


@pytest.mark.scenario(52)
@pytest.mark.parametrize(
    ("rules", "missing"),
    [("~* +@all -evalsha", "+evalsha"), ("~* +@all -setrange", "+setrange"), ("~other:* +@all", "~prefix*")],
)
async def test_a_missing_permission_is_named_in_an_error_at_start(
    server: RedisServer, effects: Effects, rules: str, missing: str
) -> None:
    async with worker_user(server, rules) as credentials:
        with pytest.raises(StoreConfigurationError) as refused:
            await _run_until_exit(effects, server, credentials)

    assert missing in str(refused.value)
    assert SECRET not in f"{refused.value!r} {refused.value}"
    assert effects.done() == set()


async def _run_until_exit(effects: Effects, server: RedisServer, credentials: dict[str, str]) -> None:
    async with open_redis_shop(effects, server.address, store=credentials) as shop:
        shop.order(1)
        await asyncio.wait({shop.worker.task})


@pytest.mark.scenario(52, 104)
async def test_a_process_with_a_wrong_password_exits_without_logging_it(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(
        f'[store]\nurl = "unix://{server.socket_path}"\nusername = "worker"\npassword = "wrong-{SECRET}"\n'
        "[telemetry]\nmetrics_port = 0\n"
    )
    arguments = ("tests.support.shop:platform", "--settings", str(tmp_path / "settings.toml"))
    async with worker_user(server):
        with ServiceProcess(*arguments, log=tmp_path / "log", env={"SHOP_JOURNAL": os.devnull}) as process:
            status = await asyncio.to_thread(process.wait)

            assert status != 0
            assert "Redis does not accept this user and password" in process.output
            assert SECRET not in process.output


@pytest.mark.scenario(52)
async def test_a_changed_password_pauses_the_worker_until_it_is_accepted_again(
    server: RedisServer, effects: Effects
) -> None:
    async with worker_user(server) as credentials, open_redis_shop(effects, server.address, store=credentials) as shop:
        shop.order(3)
        await shop.settled()

        await _set_user(server, "~* +@all", password="another")
        await asyncio.to_thread(server.admin, "CLIENT", "KILL", "USER", "worker")
        shop.order(10)
        assert "does not accept this user and password" in await shop.paused()
        assert len(shop.effects.done()) == 3
        await _set_user(server, "~* +@all")
        await shop.settled()

        shop.untouched()
