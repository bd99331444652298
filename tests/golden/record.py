"""Write the golden records of the current minor version: `python -m tests.golden.record`.

Run it once, for the release of a new minor version, and commit the files.  Files that exist are never written again: to
replace some before the release, delete them first.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.golden.files import CURRENT, path_of, write_new, written_by_this_version
from tests.golden.messages import messages
from tests.golden.scenarios import keys_and_fingerprints
from tests.golden.stores import RawStore, new_table, raw_redis, raw_sql
from tests.support.dynamodb.server import CREDENTIALS, DynamoServer
from tests.support.mariadb import MariadbServer
from tests.support.postgres import PostgresServer
from tests.support.redis import RedisServer, bundled_binary


@asynccontextmanager
async def _redis() -> AsyncIterator[RawStore]:
    with RedisServer(binary=bundled_binary()) as server:
        client = server.client()
        yield await raw_redis(client)
        await client.aclose()


@asynccontextmanager
async def _postgresql() -> AsyncIterator[RawStore]:
    with PostgresServer() as server:
        async with raw_sql(server.url) as store:
            yield store


@asynccontextmanager
async def _mysql() -> AsyncIterator[RawStore]:
    with MariadbServer() as server:
        async with raw_sql(server.url) as store:
            yield store


@asynccontextmanager
async def _sqlite() -> AsyncIterator[RawStore]:
    with tempfile.TemporaryDirectory() as folder:
        async with raw_sql(f"sqlite+aiosqlite:///{Path(folder) / 'idem.db'}") as store:
            yield store


@asynccontextmanager
async def _dynamodb() -> AsyncIterator[RawStore]:
    os.environ.update(CREDENTIALS)
    with DynamoServer() as server:
        async with new_table(server) as store:
            yield store


_STORES: dict[str, Callable[[], Any]] = {
    "redis": _redis,
    "postgresql": _postgresql,
    "mysql": _mysql,
    "sqlite": _sqlite,
    "dynamodb": _dynamodb,
}


async def _content(kind: str) -> dict[str, Any]:
    if kind == "keys":
        return {"version": CURRENT, "keys": keys_and_fingerprints()}
    if kind == "kafka":
        return {"version": CURRENT, "messages": messages()}
    async with AsyncExitStack() as stack:
        return await written_by_this_version(await stack.enter_async_context(_STORES[kind]()))


async def main() -> int:
    """Write the files that do not exist.  Returns the exit code: 1 if all of them exist."""
    missing = [kind for kind in ("keys", "kafka", *_STORES) if not path_of(CURRENT, kind).exists()]
    for kind in missing:
        print(f"wrote {write_new(kind, await _content(kind)).name}")
    if not missing:
        print(f"the golden records of {CURRENT} exist, and are never changed: see CONTRIBUTING.md")
    return 0 if missing else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
