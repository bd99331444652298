"""A Redis primary with replicas, monitored by Sentinels that fail over.

    with RedisGroup() as group:
        client = group.client()
        group.primary().kill()
        group.await_failover(...)

All methods block, like those of `RedisServer`.
"""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import RedisError

from integr8s_idem.config import RedisSentinelStoreSettings
from integr8s_idem.stores.redis import redis_sentinel_client
from tests.support.redis import RedisServer

NAME: Final = "idem"
DOWN_AFTER_MS: Final = 1000
_LONGEST_FAILOVER: Final = 60.0


class SentinelServer(RedisServer):
    """A Sentinel; it needs a configuration file that it can rewrite."""

    def __init__(self, primary_port: int, quorum: int, *more: str, binary: Path | None = None) -> None:
        super().__init__(binary=binary, tcp=True)
        self._lines = (
            f"sentinel monitor {NAME} 127.0.0.1 {primary_port} {quorum}\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {NAME} 3000\n"
            f"sentinel parallel-syncs {NAME} 2\n" + "".join(f"{line}\n" for line in more)
        )

    def _launch(self) -> None:
        file = self.folder / "sentinel.conf"
        file.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n{self._lines}")
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.binary), str(file), "--sentinel"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )


class RedisGroup:
    """A primary, two replicas and three Sentinels, each in a process."""

    def __init__(self) -> None:
        self.servers: list[RedisServer] = []
        self.sentinels: list[SentinelServer] = []
        self._stack = ExitStack()

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise

    def _start(self) -> None:
        settings = {"appendonly": "yes", "repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
        for number in range(3):
            follow = {"replicaof": ["127.0.0.1", str(self.servers[0].port)]} if number else {}
            server = RedisServer(tcp=True, config={**settings, **follow})
            self.servers.append(self._stack.enter_context(server))
        self.await_replicas()
        for _ in range(3):
            sentinel = SentinelServer(self.servers[0].port, quorum=2)
            self.sentinels.append(self._stack.enter_context(sentinel))
        _until(lambda: all(_knows_all(sentinel) for sentinel in self.sentinels), "the Sentinels are not ready")

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def primary(self) -> RedisServer:
        """Return the primary according to the Sentinels."""
        _, port = self.sentinels[0].admin("SENTINEL", "get-master-addr-by-name", NAME)
        (server,) = [server for server in self.servers if server.port == int(port)]
        return server

    def await_failover(self, old: RedisServer) -> RedisServer:
        """Return the new primary once all Sentinels agree on it and it accepts writes."""

        def done() -> bool:
            named = {str(s.admin("SENTINEL", "get-master-addr-by-name", NAME)) for s in self.sentinels}
            return len(named) == 1 and self.primary() is not old and _role(self.primary()) == "master"

        _until(done, "no failover")
        return self.primary()

    def rejoin(self, old: RedisServer) -> None:
        """Make the former primary a replica of the new one, and wait until all replicas are in sync."""
        new = self.primary()
        old.config["replicaof"] = ["127.0.0.1", str(new.port)]
        new.config.pop("replicaof", None)
        if old.running:
            old.resume()
            old.admin("REPLICAOF", "127.0.0.1", new.port)
        else:
            old.kill()
            old.start()
        self.await_replicas()
        _until(lambda: all(_knows_all(sentinel) for sentinel in self.sentinels), "the Sentinels are not ready")

    def await_replicas(self) -> None:
        """Return once the primary has two replicas in sync."""

        def done() -> bool:
            primary = self.primary() if self.sentinels else self.servers[0]
            return str(primary.admin("INFO", "replication")).count("'state': 'online'") == 2

        _until(done, "replicas are missing")

    def settings(self, **more: Any) -> RedisSentinelStoreSettings:
        """Return settings of a store with all Sentinels."""
        addresses = [f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels]
        kind = {"kind": "redis-sentinel", "sentinels": addresses, "master_name": NAME}
        return RedisSentinelStoreSettings.model_validate({**kind, **more})

    def client(self) -> Redis:
        """Create a client like that of a service. Close it with `aclose()`."""
        return redis_sentinel_client(self.settings(timeout_seconds=0.5))


def _knows_all(sentinel: SentinelServer) -> bool:
    try:
        master = _master(sentinel)
    except RedisError:
        return False
    return (
        int(master["num-slaves"]) >= 2
        and int(master["num-other-sentinels"]) == 2
        and master["flags"] == "master"
        and _replicas_are_healthy(sentinel)
    )


def _replicas_are_healthy(sentinel: SentinelServer) -> bool:
    with BlockingRedis.from_url(sentinel.url, decode_responses=True) as client:
        replicas: list[dict[str, Any]] = client.sentinel_slaves(NAME)
    return sum(not replica["is_disconnected"] and not replica["is_sdown"] for replica in replicas) >= 2


def _master(sentinel: SentinelServer) -> dict[str, str]:
    answer = sentinel.admin("SENTINEL", "MASTER", NAME)
    return dict(answer) if isinstance(answer, dict) else dict(zip(answer[::2], answer[1::2], strict=True))


def _role(server: RedisServer) -> str:
    return str(server.admin("ROLE")[0])


def _until(fact: Any, otherwise: str) -> None:
    until = time.monotonic() + _LONGEST_FAILOVER
    while True:
        try:
            if fact():
                return
        except RedisError:
            pass
        assert time.monotonic() < until, otherwise
        time.sleep(0.05)
