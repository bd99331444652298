"""All keys of the servers, page by page, and how many there are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, cast

from redis.asyncio import Redis

from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores.redis.errors import guarded
from integr8s_idem.stores.redis.servers import Servers

_COUNT: Final = 500
_COUNT_SEARCHED: Final = 2_000
"""Keys of one step of SCAN: some milliseconds of the server's time where most of them are no match."""


class Page(NamedTuple):
    """Names of keys, the server that has them, and how many keys it went by."""

    client: Redis
    names: list[bytes]
    passed: int


async def pages(
    servers: Servers, timeout: timedelta, operation: str, prefix: str, holding: Sequence[str] = ()
) -> AsyncIterator[Page]:
    """Keys that start with `prefix` and hold these parts behind it, in this order.  A page may be empty."""
    pattern = servers.pattern("*".join(map(_literal, (prefix, *holding))) + "*")
    count = _COUNT_SEARCHED if holding else _COUNT
    with guarded(operation, timeout):
        primaries = await servers.primaries()
    for client in primaries:
        cursor = 0
        while True:
            with guarded(operation, timeout):
                cursor, names = await client.scan(cursor, match=pattern, count=count)
            yield Page(client, cast(list[bytes], names), count)
            if cursor == 0:
                break


async def size(servers: Servers, timeout: timedelta) -> int | None:
    """How many keys there are, those of other programs included; `None` where this user may not ask."""
    keys = 0
    try:
        with guarded("size", timeout):
            for client in await servers.primaries():
                told: Any = await client.info("keyspace")
                database = client.connection_pool.connection_kwargs.get("db") or 0
                keys += int(told.get(f"db{database}", {}).get("keys", 0))
    except StoreConfigurationError as error:
        if error.code is Code.STORE_PERMISSION:
            return None
        raise
    return keys


def name_of(raw: bytes) -> str | None:
    """A key as text; `None` for one that is somebody else's: ours are ASCII."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _literal(text: str) -> str:
    """A pattern for SCAN that `text` matches letter by letter."""
    return "".join("\\" + letter if letter in "\\*?[]" else letter for letter in text)
