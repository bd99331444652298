"""What a Redis server tells about itself, and what its settings would lose."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from integr8s_idem.findings import Code, StoreWarning
from integr8s_idem.records import StoreHealth

_ROOM: Final = 0.9
"""How much of maxmemory may be used before it is said."""


async def health_of(client: Redis, mark: str) -> StoreHealth:
    """Ask the server; raises what the driver raises.  `mark`: the key that names what the server holds."""
    start = time.perf_counter()
    await client.ping()
    latency = timedelta(seconds=time.perf_counter() - start)
    identity, info = await _mark_and_info(client, mark)
    if info is None:
        # An ACL user without +info: the store works, its settings stay unseen.
        return StoreHealth(
            kind="redis",
            version="unknown",
            latency=latency,
            identity=identity,
            warnings=(
                StoreWarning(
                    Code.STORE_UNSEEN,
                    "this Redis user may not run INFO",
                    "settings that lose records stay unseen",
                    "give it +info",
                ),
            ),
        )
    fsync = await _setting(client, "appendfsync") if info.get("aof_enabled") else ""
    kept = _about_sync(fsync) if info.get("aof_enabled") else await _about_persistence(client)
    return StoreHealth(
        kind="redis",
        version=_version(info),
        latency=latency,
        warnings=(*_about_role(info), *_about_memory(info), *kept),
        identity=identity,
        lineage=_lineage(info),
        start=str(info.get("run_id", "")),
        keeps_all=fsync == "always",
    )


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
    fresh = f"{secrets.token_hex(8)} {datetime.now(UTC).isoformat(timespec='seconds')}"
    async with client.pipeline(transaction=False) as pipeline:
        pipeline.set(mark, fresh, nx=True)
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
