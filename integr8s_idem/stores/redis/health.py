"""What a Redis server tells about itself, and what its settings would lose."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from integr8s_idem.diagnostics import Code, StoreWarning
from integr8s_idem.records import StoreHealth
from integr8s_idem.stores.redis.round_trips import Address, ReplicaWait, all_of

_NO_INFO: Final = StoreWarning(
    Code.STORE_UNSEEN, "this Redis user may not run INFO", "settings that lose records stay unseen", "give it +info"
)

_ROOM: Final = 0.9
"""How much of maxmemory may be used before it is said."""


class Health:
    """What servers tell about themselves.  Its methods raise what the driver raises.

    Of a cluster it remembers what it saw, so that a server that took another one's place, or was started
    anew, is told from one that joined.
    """

    def __init__(self, wait: ReplicaWait | None) -> None:
        self._wait = wait
        self._histories: set[str] = set()
        self._lineage = ("", "")
        self._starts: dict[Address, str] = {}
        self._start = ""

    async def of_one(self, client: Redis, mark: str) -> StoreHealth:
        """`mark`: the key that names what the server holds."""
        latency = await _latency(client)
        identity, info = await _mark_and_info(client, mark)
        if info is None:
            # An ACL user without +info: the store works, its settings stay unseen.
            return StoreHealth(
                kind="redis", version="unknown", latency=latency, identity=identity, warnings=(_NO_INFO,)
            )
        fsync = await _fsync(client, info)
        return StoreHealth(
            kind="redis",
            version=_version(info),
            latency=latency,
            warnings=tuple(await self._warnings(client, info, fsync)),
            identity=identity,
            lineage=_lineage(info),
            start=str(info.get("run_id", "")),
            keeps_all=fsync == "always",
        )

    async def of_cluster(self, servers: Mapping[Address, Redis], marks: Sequence[bytes]) -> StoreHealth:
        """`servers`: all primaries.  `marks`: what the mark of each bucket says."""
        told = await all_of([self._told(client) for client in servers.values()])
        warnings: dict[StoreWarning, list[str]] = {}
        for (host, port), one in zip(servers, told, strict=True):
            for warning in one.warnings:
                warnings.setdefault(warning, []).append(f"{host}:{port}")
        for address, one in zip(servers, told, strict=True):
            self._notice(address, one.info)
        return StoreHealth(
            kind="redis-cluster",
            version=", ".join(sorted({one.version for one in told})),
            latency=max(one.latency for one in told),
            warnings=tuple(_on(where, warning) for warning, where in warnings.items()),
            identity=hashlib.sha256(b"\n".join(marks)).hexdigest()[:32],
            lineage=self._lineage,
            start=self._start,
            keeps_all=all(one.keeps_all for one in told),
        )

    async def _told(self, client: Redis) -> _Told:
        latency = await _latency(client)
        # ASKING is needed only while slots move: whether we may is better known before.
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command("ASKING")
            pipeline.execute_command("INFO")
            asking, info = await pipeline.execute(raise_on_error=False)
        if isinstance(asking, Exception):
            raise asking
        if isinstance(info, Exception):
            if not _is_refusal(info):
                raise info
            return _Told(latency, "unknown", [_NO_INFO], {}, keeps_all=False)
        fsync = await _fsync(client, info)
        warnings = await self._warnings(client, info, fsync)
        return _Told(latency, _version(info), warnings, info, keeps_all=fsync == "always")

    def _notice(self, address: Address, info: Mapping[str, Any]) -> None:
        """A primary follows another one's history, or has been started anew, if it was seen before."""
        history, before = _lineage(info)
        if history and history not in self._histories:
            if before in self._histories or not self._histories:
                self._lineage = (history, before)
            self._histories.add(history)
        start = str(info.get("run_id", ""))
        if (start and self._starts.get(address, start) != start) or not self._start:
            self._start = start
        self._starts[address] = start

    async def _warnings(self, client: Redis, info: Mapping[str, Any], fsync: str | None) -> list[StoreWarning]:
        kept = _about_sync(fsync) if info.get("aof_enabled") else await _about_persistence(client)
        return [*_about_role(info), *_about_memory(info), *_about_replicas(info, self._wait), *kept]


class _Told(NamedTuple):
    latency: timedelta
    version: str
    warnings: list[StoreWarning]
    info: Mapping[str, Any]
    keeps_all: bool


def _on(servers: Sequence[str], warning: StoreWarning) -> StoreWarning:
    return StoreWarning(warning.code, f"on {', '.join(servers)}: {warning.what}", warning.cost, warning.remedy)


def fresh_mark() -> str:
    return f"{secrets.token_hex(8)} {datetime.now(UTC).isoformat(timespec='seconds')}"


async def _latency(client: Redis) -> timedelta:
    start = time.perf_counter()
    await client.ping()
    return timedelta(seconds=time.perf_counter() - start)


async def _fsync(client: Redis, info: Mapping[str, Any]) -> str | None:
    """How the append-only file is written; empty without one, `None` if this user is not told."""
    return await _setting(client, "appendfsync") if info.get("aof_enabled") else ""


async def _setting(client: Redis, name: str) -> str | None:
    """A setting of the server; `None` if it does not tell this user."""
    try:
        return str((await client.config_get(name)).get(name, ""))
    except (NoPermissionError, ResponseError) as error:
        if not _is_refusal(error):
            raise
        return None


def _lineage(info: Mapping[str, Any]) -> tuple[str, str]:
    """Redis keeps the replication id of the primary that a replica followed before it was promoted."""
    before = str(info.get("master_replid2", ""))
    return str(info.get("master_replid", "")), before if before.strip("0") else ""


async def _mark_and_info(client: Redis, mark: str) -> tuple[str, Mapping[str, Any] | None]:
    """What the mark says, made by whoever comes first if it is not there; and INFO, `None` if that is forbidden.

    The commands are those of the scripts, so that a server that takes no writes, or a user who may not run
    one of them, shows here rather than at the first event.  None of them changes a mark that is there.
    All go by one connection: in a failover another one may lead to another server.
    """
    async with client.pipeline(transaction=False) as pipeline:
        pipeline.set(mark, fresh_mark(), nx=True)
        pipeline.setrange(mark, 0, "")
        pipeline.pttl(mark)
        pipeline.pexpire(f"{mark}:none", 1)
        pipeline.get(mark)
        pipeline.info()
        *answers, info = await pipeline.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    if isinstance(info, Exception):
        if not _is_refusal(info):
            raise info
        info = None
    found: bytes = answers[-1]
    return found.decode(errors="replace"), info


def _is_refusal(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, NoPermissionError) or (
        isinstance(error, ResponseError) and ("unknown command" in text or "permission" in text)
    )


def _version(info: Mapping[str, Any]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return str(info.get("redis_version", "unknown"))


def _about_role(info: Mapping[str, Any]) -> list[StoreWarning]:
    if info.get("role") != "slave":
        return []
    state, cost = ("read-only", "it takes no records")
    if not info.get("slave_read_only"):
        state, cost = ("writable", "it loses what is written to it")
    return [
        StoreWarning(Code.STORE_REPLICA, f"this server is a replica ({state})", cost, "give the address of its primary")
    ]


def _about_memory(info: Mapping[str, Any]) -> list[StoreWarning]:
    policy, limit = info.get("maxmemory_policy", "noeviction"), int(info.get("maxmemory", 0))
    if policy != "noeviction":
        when = f"beyond {limit} bytes" if limit else "as soon as maxmemory is set"
        told = f"maxmemory-policy {policy} drops records {when}"
        return [StoreWarning(Code.STORE_EVICTION, told, "events that come again run again", "set it to noeviction")]
    if limit and int(info.get("used_memory", 0)) > _ROOM * limit:
        # Without the number that changes: who logs warnings logs each one once.
        told = f"more than {_ROOM:.0%} of maxmemory ({limit} bytes) is used"
        cost = "once it is full, writes are refused and the workers pause"
        return [StoreWarning(Code.STORE_MEMORY, told, cost, "raise maxmemory, or lower the ttl")]
    return []


def _about_sync(fsync: str | None) -> list[StoreWarning]:
    if fsync != "no":
        return []
    cost = "a loss of power takes what came in the last half minute, and its events run again if they come again"
    return [StoreWarning(Code.STORE_LATE_SYNC, "appendfsync is no", cost, "set it to everysec or always")]


def _about_replicas(info: Mapping[str, Any], wait: ReplicaWait | None) -> list[StoreWarning]:
    connected = int(info.get("connected_slaves", 0))
    if wait is None or connected >= wait.replicas:
        return []
    what = f"{connected} replicas are connected, but wait_replicas = {wait.replicas} must have each write"
    remedy = "bring the replicas back, or lower wait_replicas in [store]"
    return [StoreWarning(Code.STORE_TOO_FEW_REPLICAS, what, "all writes are refused", remedy)]


async def _about_persistence(client: Redis) -> list[StoreWarning]:
    """Of a server without append-only file."""
    save = await _setting(client, "save")
    if save is None:
        return [
            StoreWarning(
                Code.STORE_UNSEEN,
                "this Redis user may not run CONFIG GET, and appendonly is off",
                "whether records survive a restart stays unseen",
                "give it +config|get, or set appendonly yes",
            )
        ]
    what, cost = "nothing is written to disk", "a restart loses all records"
    if save:
        what, cost = "appendonly is off", "a crash loses all records since the last snapshot"
    return [StoreWarning(Code.STORE_NOT_PERSISTENT, what, cost, "set appendonly yes")]
