"""A Redis Cluster of three primaries with a replica each.

    with RedisCluster() as cluster:
        cluster.move_slots([5, 6, 7], cluster.primaries()[1])
        cluster.owner(5).kill()

All methods block, like those of `RedisServer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from redis import Redis as BlockingRedis
from redis.exceptions import RedisError

from integr8s_idem.config import RedisClusterStoreSettings
from tests.support.redis import RedisServer

SLOTS: Final = 16_384
NODE_TIMEOUT_MS: Final = 1_500
_LONGEST: Final = 60.0
BUS: Final = 10_000
"""Distance from the port of a node to that of its cluster bus."""


class RedisCluster:
    """Six server processes."""

    def __init__(self, *, config: Mapping[str, str] | None = None, binary: Path | None = None) -> None:
        self.servers: list[RedisServer] = []
        self._binary = binary
        self._config = dict(config or {})
        self._stack = ExitStack()

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise

    def _start(self) -> None:
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "appendonly": "yes",
            "repl-diskless-sync-delay": "0",
            "repl-ping-replica-period": "1",
            # A replica without data must be allowed to take part in elections, however old its data are.
            "cluster-replica-validity-factor": "0",
            **self._config,
        }
        for _ in range(6):
            server = RedisServer(binary=self._binary, tcp=True, config=settings, beside=BUS)
            self.servers.append(self._stack.enter_context(server))
        primaries, replicas = self.servers[:3], self.servers[3:]
        for epoch, server in enumerate(self.servers, start=1):
            server.admin("CLUSTER", "SET-CONFIG-EPOCH", epoch)
            server.admin("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        for number, server in enumerate(primaries):
            first, last = number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1
            server.admin("CLUSTER", "ADDSLOTS", *range(first, last + 1))
        self._until(lambda: all(len(_nodes(server)) == 6 for server in self.servers), "the nodes are not connected")
        for primary, replica in zip(primaries, replicas, strict=True):
            replica.admin("CLUSTER", "REPLICATE", self.id_of(primary))
        self.await_health()

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def settings(self, **more: Any) -> RedisClusterStoreSettings:
        """Return settings of a store with all nodes as startup nodes."""
        urls = [server.url.removesuffix("/0") for server in self.servers]
        return RedisClusterStoreSettings.model_validate({"kind": "redis-cluster", "urls": urls, **more})

    def id_of(self, server: RedisServer) -> str:
        return str(server.admin("CLUSTER", "MYID"))

    def primaries(self) -> list[RedisServer]:
        return [server for server in self.servers if server.running and _role(server) == "master"]

    def owner(self, slot: int) -> RedisServer:
        """Return the owner of a slot, on which all running servers agree."""
        ports = {_owner(server, slot) for server in self.servers if server.running}
        (port,) = ports
        return self._at(port)

    def slots_of(self, server: RedisServer) -> set[int]:
        """Return the slots of a server in its own view."""
        mine = ((first, last) for first, last, primary, *_ in _ranges(server) if int(primary[1]) == server.port)
        return {slot for first, last in mine for slot in range(first, last + 1)}

    def replica_of(self, primary: RedisServer) -> RedisServer:
        """Return the replica of `primary` that is in sync."""
        wanted = self.id_of(primary)
        (node,) = [node for node in _nodes(primary) if node.primary == wanted]
        return self._at(node.port)

    def _at(self, port: int) -> RedisServer:
        (server,) = [server for server in self.servers if server.port == port]
        return server

    def await_health(self) -> None:
        """Return once all nodes agree, every slot is served and each primary has a replica in sync."""

        def done() -> bool:
            views = {str(_view(server)) for server in self.servers}
            primaries = self.primaries()
            agreed = len(views) == 1 and len(primaries) == 3
            return agreed and self._serve(self.servers) and all(map(_followed, primaries))

        self._until(done, "the cluster is not healthy")

    def hand_over(self, primary: RedisServer) -> None:
        """Fail over to the replica while both servers run."""
        replica = self.replica_of(primary)

        def done() -> bool:
            if _role(replica) == "master":
                return True
            # Repeat the request: on a busy machine the two servers may not agree in time and abort the failover.
            replica.admin("CLUSTER", "FAILOVER")
            time.sleep(0.5)
            return False

        self._until(done, "the replica does not replace its primary")

    def await_owner(self, slot: int, *, other_than: RedisServer) -> RedisServer:
        """Return once the running servers agree on a new owner of the slot and serve all slots."""

        def done() -> bool:
            running = [server for server in self.servers if server.running and server is not other_than]
            owners = {_owner(server, slot) for server in running}
            return len(owners) == 1 and other_than.port not in owners and self._serve(running)

        self._until(done, "no failover")
        server = next(server for server in self.servers if server.running and server is not other_than)
        return self._at(_owner(server, slot))

    def rejoin(self, old: RedisServer) -> None:
        """Start a killed server or resume a paused one, and wait until it replicates the new primary."""
        if old.running:
            old.resume()
        else:
            old.kill()
            old.start()
        self.await_health()

    def move_slots(self, slots: Iterable[int], to: RedisServer, *, between: Callable[[], object] = int) -> int:
        """Move slots with their keys, and return the number of keys moved.

        Args:
            slots: The slots to move.
            to: The new owner.
            between: Called while a slot is being moved, after every few keys.
        """
        return sum(self._move(slot, to, between) for slot in slots)

    def _move(self, slot: int, to: RedisServer, between: Callable[[], object]) -> int:
        moved = 0
        with self.half_moved(slot, to) as source:
            while names := source.admin("CLUSTER", "GETKEYSINSLOT", slot, 3):
                self._migrate(source, to, names)
                moved += len(names)
                between()
        return moved

    @contextmanager
    def half_moved(self, slot: int, to: RedisServer) -> Iterator[RedisServer]:
        """Keep a slot in migration to another server during the block, and finish afterwards. Yields the old owner."""
        source = self._at(_owner(to, slot))
        source_id, to_id = self.id_of(source), self.id_of(to)
        to.admin("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.admin("CLUSTER", "SETSLOT", slot, "MIGRATING", to_id)
        yield source
        while names := source.admin("CLUSTER", "GETKEYSINSLOT", slot, 100):
            self._migrate(source, to, names)
        to.admin("CLUSTER", "SETSLOT", slot, "NODE", to_id)
        source.admin("CLUSTER", "SETSLOT", slot, "NODE", to_id)

    def _migrate(self, source: RedisServer, to: RedisServer, names: list[str]) -> None:
        source.admin("MIGRATE", "127.0.0.1", to.port, "", 0, 5_000, "KEYS", *names)

    def flush(self) -> None:
        """Delete all records and scripts on all servers."""
        for server in self.primaries():
            server.flush()

    @staticmethod
    def _serve(servers: Iterable[RedisServer]) -> bool:
        return {_state(server) for server in servers} == {"cluster_state:ok"}

    def _until(self, fact: Callable[[], bool], otherwise: str) -> None:
        until = time.monotonic() + _LONGEST
        while True:
            try:
                if fact():
                    return
            except RedisError:
                pass
            assert time.monotonic() < until, otherwise
            time.sleep(0.05)


def _role(server: RedisServer) -> str:
    return str(server.admin("ROLE")[0])


def _followed(primary: RedisServer) -> bool:
    return "'state': 'online'" in str(primary.admin("INFO", "replication"))


class Node(NamedTuple):
    """A server in the view of another one."""

    port: int
    flags: frozenset[str]
    primary: str
    slots: tuple[str, ...]


def _nodes(server: RedisServer) -> list[Node]:
    lines = [line.split() for line in str(server.admin("CLUSTER", "NODES")).splitlines()]
    return [
        Node(int(address.partition("@")[0].rpartition(":")[2]), frozenset(flags.split(",")), primary, tuple(slots))
        for _, address, flags, primary, _, _, _, _, *slots in lines
    ]


def _view(server: RedisServer) -> list[tuple[int, list[str], tuple[str, ...]]]:
    return sorted((node.port, sorted(node.flags - {"myself"}), node.slots) for node in _nodes(server))


def _owner(server: RedisServer, slot: int) -> int:
    for first, last, primary, *_ in _ranges(server):
        if first <= slot <= last:
            return int(primary[1])
    return 0


def _ranges(server: RedisServer) -> list[Any]:
    with BlockingRedis.from_url(server.url) as client:
        answer: list[Any] = client.execute_command("CLUSTER", "SLOTS")
        return answer


def _state(server: RedisServer) -> str:
    return next(line for line in str(server.admin("CLUSTER", "INFO")).splitlines() if line.startswith("cluster_state"))
