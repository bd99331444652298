"""List and count the keys of the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, cast

from redis.asyncio import Redis
from redis.exceptions import AskError, ResponseError, TryAgainError

from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores.redis import codec
from integr8s_idem.stores.redis.errors import guarded
from integr8s_idem.stores.redis.round_trips import send
from integr8s_idem.stores.redis.servers import Servers

_COUNT: Final = 500
"""COUNT of SCAN."""
_COUNT_SEARCHED: Final = 2_000
"""COUNT of SCAN if few keys match: a step takes a few milliseconds of server time."""


class Page(NamedTuple):
    """Names of keys, the server that has them, and the number of keys scanned."""

    client: Redis
    names: list[bytes]
    passed: int


async def pages(
    servers: Servers, timeout: timedelta, operation: str, prefix: str, holding: Sequence[str] = ()
) -> AsyncIterator[Page]:
    """Yield pages, which may be empty, of keys with `prefix` that contain the parts of `holding` after it, in order."""
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
    """Return the number of keys, including those of other programs; `None` if this user may not run INFO."""
    keys = 0
    try:
        with guarded("size", timeout):
            for client in await servers.primaries():
                info: Any = await client.info("keyspace")
                database = client.connection_pool.connection_kwargs.get("db") or 0
                keys += int(info.get(f"db{database}", {}).get("keys", 0))
    except StoreConfigurationError as error:
        if error.code is Code.STORE_PERMISSION:
            return None
        raise
    return keys


def name_of(raw: bytes) -> str | None:
    """Return a key as text; `None` for a key of another program, since keys of records are ASCII."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _literal(text: str) -> str:
    """Escape `text` for a pattern of SCAN."""
    return "".join("\\" + char if char in "\\*?[]" else char for char in text)


async def headers(client: Redis, names: list[bytes]) -> list[bytes | Exception]:
    """Return the headers of the records with these names, or why one cannot be read.

    Raises:
        ResponseError: The server refuses.
    """
    found: list[bytes | Exception] = await send(
        client, [("GETRANGE", name, 0, codec.HEADER_BYTES - 1) for name in names]
    )
    for header in found:
        # A key of another type is not a record, and a key that is moving to another server is counted there.
        is_skipped = isinstance(header, AskError | TryAgainError) or str(header).startswith("WRONGTYPE")
        if isinstance(header, ResponseError) and not is_skipped:
            raise header
    return found
