"""The embedded Redis: a real server that leaves no files or processes."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis

from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.embedded import EmbeddedRedis, embedded


async def test_both_servers_run_only_inside_the_block() -> None:
    async with embedded() as servers:
        assert servers.redis_url is not None
        url = RedisStoreSettings(url=servers.redis_url).url
        with Redis.from_url(url) as client:
            assert client.ping()

    assert not Path(url.removeprefix("unix://")).parent.exists()


def test_the_server_evicts_nothing_and_listens_on_no_port() -> None:
    redis = EmbeddedRedis()
    redis.start()
    try:
        with Redis.from_url(redis.url, decode_responses=True) as client:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("port") == {"port": "0"}
    finally:
        redis.stop()


@pytest.mark.parametrize(("durable", "kept"), [(True, b"1"), (False, None)])
def test_a_killed_server_keeps_its_writes_only_if_durable(durable: bool, kept: bytes | None) -> None:
    redis = EmbeddedRedis(durable=durable)
    redis.start()
    try:
        with Redis.from_url(redis.url) as client:
            client.set("key", "1")

        redis.kill()
        redis.restart()

        with Redis.from_url(redis.url) as client:
            assert client.get("key") == kept
    finally:
        redis.stop()


@pytest.fixture
def short_folder() -> Iterator[str]:
    """Return a folder for the files of a killed parent; the paths of `tmp_path` are too long for a socket."""
    with tempfile.TemporaryDirectory(prefix="idem-") as folder:
        yield folder


def test_the_server_ends_when_its_parent_is_killed(short_folder: str) -> None:
    script = (
        "import sys; from integr8s_idem.embedded import EmbeddedRedis; redis = EmbeddedRedis(); redis.start();"
        "print(redis.pid, flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "TMPDIR": short_folder}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    server = int(parent.stdout.readline())

    parent.kill()
    parent.communicate()

    assert _gone(server)


def _gone(pid: int) -> bool:
    """Return whether the process ends within five seconds; a zombie counts as ended."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
