"""What a Redis server tells about itself, and what its settings would lose."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from integr8s_idem.records import StoreHealth


async def health_of(client: Redis) -> StoreHealth:
    """Ask the server; raises what the driver raises."""
    start = time.perf_counter()
    await client.ping()
    latency = timedelta(seconds=time.perf_counter() - start)
    try:
        info: Mapping[str, Any] = await client.info()
    except (NoPermissionError, ResponseError) as error:
        _only_refusals(error)
        return StoreHealth(
            kind="redis",
            version="unknown",
            latency=latency,
            warnings=("this Redis user may not run INFO: settings that lose records stay unseen; give it +info",),
        )
    warnings = [*_about_role(info), *_about_eviction(info), *await _about_persistence(client, info)]
    return StoreHealth(kind="redis", version=_version(info), latency=latency, warnings=tuple(warnings))


def _only_refusals(error: ResponseError) -> None:
    text = str(error).lower()
    if not isinstance(error, NoPermissionError) and "unknown command" not in text and "permission" not in text:
        raise error


def _version(info: Mapping[str, Any]) -> str:
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return str(info.get("redis_version", "unknown"))


def _about_role(info: Mapping[str, Any]) -> list[str]:
    if info.get("role") != "slave":
        return []
    state = "read-only" if info.get("slave_read_only") else "writable, and loses what is written to it"
    return [f"this server is a replica ({state}): give the address of its primary"]


def _about_eviction(info: Mapping[str, Any]) -> list[str]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return []
    limit = info.get("maxmemory", 0)
    when = f"beyond {limit} bytes" if limit else "as soon as maxmemory is set"
    return [f"maxmemory-policy {policy} drops records {when}: set it to noeviction"]


async def _about_persistence(client: Redis, info: Mapping[str, Any]) -> list[str]:
    if info.get("aof_enabled"):
        return []
    try:
        save = (await client.config_get("save")).get("save", "")
    except (NoPermissionError, ResponseError) as error:
        _only_refusals(error)
        return [
            "this Redis user may not run CONFIG GET, and appendonly is off: "
            "whether records survive a restart stays unseen; give it +config|get, or set appendonly yes"
        ]
    if save:
        return ["without appendonly, a crash loses all records since the last snapshot: set appendonly yes"]
    return ["nothing is written to disk: a restart loses all records; set appendonly yes"]
