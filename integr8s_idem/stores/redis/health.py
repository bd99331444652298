"""Health checks of Redis servers, and warnings about settings that lose records."""

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
    Code.STORE_UNSEEN,
    "this Redis user may not run INFO",
    "settings that lose records go unnoticed",
    "grant it +info",
)

_MEMORY_THRESHOLD: Final = 0.9
"""Fraction of maxmemory that may be used without a warning."""


class Health:
    """Reads the health of servers.  Its methods raise the errors of the driver.

    It remembers the servers of a cluster, to distinguish a server that replaced another one, or was restarted,
    from one that joined.
    """

    def __init__(self, wait: ReplicaWait | None) -> None:
        self._wait = wait
        self._histories: set[str] = set()
        self._lineage = ("", "")
        self._starts: dict[Address, str] = {}
        self._start = ""

    async def of_one(self, client: Redis, store_id_key: str) -> StoreHealth:
        """Return the health of one server; `store_id_key` holds the id of its data."""
        latency = await _latency(client)
        identity, info = await _store_id_and_info(client, store_id_key)
        if info is None:
            # An ACL user without +info: the store works, but its settings cannot be checked.
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

    async def of_cluster(self, primaries: Mapping[Address, Redis], store_ids: Sequence[bytes]) -> StoreHealth:
        """Return the health of a cluster; `store_ids` has one id per bucket."""
        states = await all_of([self._state(client) for client in primaries.values()])
        warnings: dict[StoreWarning, list[str]] = {}
        for (host, port), state in zip(primaries, states, strict=True):
            for warning in state.warnings:
                warnings.setdefault(warning, []).append(f"{host}:{port}")
        for address, state in zip(primaries, states, strict=True):
            self._update_lineage(address, state.info)
        return StoreHealth(
            kind="redis-cluster",
            version=", ".join(sorted({state.version for state in states})),
            latency=max(state.latency for state in states),
            warnings=tuple(_on(addresses, warning) for warning, addresses in warnings.items()),
            identity=hashlib.sha256(b"\n".join(store_ids)).hexdigest()[:32],
            lineage=self._lineage,
            start=self._start,
            keeps_all=all(state.keeps_all for state in states),
        )

    async def _state(self, client: Redis) -> _ServerState:
        latency = await _latency(client)
        # ASKING is needed only while slots move; test the permission before that.
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.execute_command("ASKING")
            pipeline.execute_command("INFO")
            asking, info = await pipeline.execute(raise_on_error=False)
        if isinstance(asking, Exception):
            raise asking
        if isinstance(info, Exception):
            if not _is_refusal(info):
                raise info
            return _ServerState(latency, "unknown", [_NO_INFO], {}, keeps_all=False)
        fsync = await _fsync(client, info)
        warnings = await self._warnings(client, info, fsync)
        return _ServerState(latency, _version(info), warnings, info, keeps_all=fsync == "always")

    def _update_lineage(self, address: Address, info: Mapping[str, Any]) -> None:
        """Detect a failover or a restart by comparing a primary with what was seen before."""
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


class _ServerState(NamedTuple):
    latency: timedelta
    version: str
    warnings: list[StoreWarning]
    info: Mapping[str, Any]
    keeps_all: bool


def _on(servers: Sequence[str], warning: StoreWarning) -> StoreWarning:
    return StoreWarning(warning.code, f"on {', '.join(servers)}: {warning.what}", warning.cost, warning.remedy)


def new_store_id() -> str:
    """Return a random id and the current time."""
    return f"{secrets.token_hex(8)} {datetime.now(UTC).isoformat(timespec='seconds')}"


async def _latency(client: Redis) -> timedelta:
    start = time.perf_counter()
    await client.ping()
    return timedelta(seconds=time.perf_counter() - start)


async def _fsync(client: Redis, info: Mapping[str, Any]) -> str | None:
    """Return `appendfsync`; empty without an append-only file, `None` if this user may not read it."""
    return await _setting(client, "appendfsync") if info.get("aof_enabled") else ""


async def _setting(client: Redis, name: str) -> str | None:
    """Return a setting of the server; `None` if this user may not read it."""
    try:
        return str((await client.config_get(name)).get(name, ""))
    except (NoPermissionError, ResponseError) as error:
        if not _is_refusal(error):
            raise
        return None


def _lineage(info: Mapping[str, Any]) -> tuple[str, str]:
    """Return the replication id, and that of the primary that this server followed before it was promoted."""
    before = str(info.get("master_replid2", ""))
    return str(info.get("master_replid", "")), before if before.strip("0") else ""


async def _store_id_and_info(client: Redis, key: str) -> tuple[str, Mapping[str, Any] | None]:
    """Return the store id, creating it if absent, and INFO, or `None` if this user may not run it.

    The commands are those of the scripts, so that a read-only server or a missing permission is detected here
    rather than at the first event.  None of them changes an existing store id.
    All of them use one connection, since during a failover another one may lead to another server.
    """
    async with client.pipeline(transaction=False) as pipeline:
        pipeline.set(key, new_store_id(), nx=True)
        pipeline.setrange(key, 0, "")
        pipeline.pttl(key)
        pipeline.pexpire(f"{key}:none", 1)
        pipeline.get(key)
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
    state, cost = ("read-only", "it does not accept records")
    if not info.get("slave_read_only"):
        state, cost = ("writable", "records written to it are lost")
    return [
        StoreWarning(Code.STORE_REPLICA, f"this server is a replica ({state})", cost, "set the address of its primary")
    ]


def _about_memory(info: Mapping[str, Any]) -> list[StoreWarning]:
    policy, limit = info.get("maxmemory_policy", "noeviction"), int(info.get("maxmemory", 0))
    if policy != "noeviction":
        when = f"beyond {limit} bytes" if limit else "as soon as maxmemory is set"
        what = f"maxmemory-policy {policy} drops records {when}"
        return [StoreWarning(Code.STORE_EVICTION, what, "redelivered events run again", "set it to noeviction")]
    if limit and int(info.get("used_memory", 0)) > _MEMORY_THRESHOLD * limit:
        # No current number: warnings that have been logged are recognized by their text.
        what = f"more than {_MEMORY_THRESHOLD:.0%} of maxmemory ({limit} bytes) is used"
        cost = "once it is full, Redis refuses writes and the workers pause"
        return [StoreWarning(Code.STORE_MEMORY, what, cost, "raise maxmemory, or lower the ttl")]
    return []


def _about_sync(fsync: str | None) -> list[StoreWarning]:
    if fsync != "no":
        return []
    cost = "a power failure loses the records of the last 30 seconds, and their events run again if redelivered"
    return [StoreWarning(Code.STORE_LATE_SYNC, "appendfsync is set to no", cost, "set it to everysec or always")]


def _about_replicas(info: Mapping[str, Any], wait: ReplicaWait | None) -> list[StoreWarning]:
    connected = int(info.get("connected_slaves", 0))
    if wait is None or connected >= wait.replicas:
        return []
    what = f"{connected} replicas are connected, but wait_replicas = {wait.replicas}"
    remedy = "restore the replicas, or lower wait_replicas in [store]"
    return [StoreWarning(Code.STORE_TOO_FEW_REPLICAS, what, "all writes are refused", remedy)]


async def _about_persistence(client: Redis) -> list[StoreWarning]:
    """Return warnings for a server without an append-only file."""
    save = await _setting(client, "save")
    if save is None:
        return [
            StoreWarning(
                Code.STORE_UNSEEN,
                "this Redis user may not run CONFIG GET, and appendonly is off",
                "whether records survive a restart is unknown",
                "grant it +config|get, or set appendonly yes",
            )
        ]
    what, cost = "nothing is written to disk", "a restart loses all records"
    if save:
        what, cost = "appendonly is off", "a crash loses all records since the last snapshot"
    return [StoreWarning(Code.STORE_NOT_PERSISTENT, what, cost, "set appendonly yes")]
