"""A real server for each kind of store, and settings to open stores on it.

    with open_home("postgresql") as home:
        async with open_records(home.settings(folder, timeout_seconds=1), "billing") as store:
            ...

Settings are plain data, as in `[store]`, and can be passed to other processes or written to a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter

from integr8s_idem.config import StoreSettings
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import open_store
from tests.support.dynamodb.server import CREDENTIALS, DynamoServer, missing_jars
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer
from tests.support.redis import RedisServer
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_sentinel import RedisGroup

StoreTable = dict[str, Any]
"""The settings in `[store]`."""

CONNECTIONS: Final = 4
"""Size of the connection pool of each engine."""

LOCK_TIMEOUT: Final = 0.25
"""Seconds; shorter than the store timeout of any worker in the tests."""

WAIT: Final = 0.2
"""Seconds to wait for a replica to confirm a write; shorter than the store timeout of any worker in the tests."""

_settings: Final[TypeAdapter[StoreSettings]] = TypeAdapter(StoreSettings)


@dataclass(frozen=True)
class StoreKind:
    """How to start a server of a kind."""

    server: Callable[[], AbstractContextManager[Any]]
    """A context manager that runs the server."""
    settings: Callable[[Any, Path], StoreTable]
    """Returns the settings of a store on that server, without `kind`; the folder is for this store alone."""
    has_tables: bool = False
    """Whether tables must be created with `migrate`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with credentials, for this process and its children."""
    missing: Callable[[], str] = str
    """Returns why no server can be started here; empty if one can."""


def plain(settings: BaseModel) -> StoreTable:
    """Return the explicit settings without `kind`."""
    table: StoreTable = json.loads(json.dumps(settings.model_dump(exclude_unset=True, exclude={"kind"})))
    return table


KINDS: Final[Mapping[str, StoreKind]] = {
    "redis": StoreKind(RedisServer, lambda server, _: {"url": server.url}),
    "postgresql": StoreKind(
        partial(PostgresServer, keeps_commits=True, connections=300),
        lambda server, _: {"url": server.url, "max_connections": CONNECTIONS, "lock_timeout_seconds": LOCK_TIMEOUT},
        has_tables=True,
    ),
    "mysql": StoreKind(
        partial(MariadbServer, keeps_commits=True, settings={"max-connections": "300"}),
        lambda server, _: {"url": server.url, "max_connections": CONNECTIONS, "lock_timeout_seconds": 1},
        has_tables=True,
        missing=missing_programs,
    ),
    "sqlite": StoreKind(
        nullcontext, lambda _, folder: {"path": str(folder / "store.db"), "lock_timeout_seconds": LOCK_TIMEOUT}
    ),
    "redis-cluster": StoreKind(
        RedisCluster, lambda server, _: plain(server.settings(wait_replicas=1, wait_timeout_seconds=WAIT))
    ),
    "redis-sentinel": StoreKind(
        RedisGroup, lambda server, _: plain(server.settings(wait_replicas=1, wait_timeout_seconds=WAIT))
    ),
    "dynamodb": StoreKind(
        DynamoServer,
        lambda server, _: plain(server.settings()),
        has_tables=True,
        env=CREDENTIALS,
        missing=missing_jars,
    ),
}


def at_hand(*kinds: str) -> tuple[str, ...]:
    """Return those of `kinds` whose servers can be started here."""
    return tuple(kind for kind in kinds if not KINDS[kind].missing())


@dataclass(frozen=True)
class Home:
    """A running server; services share it and are separated by key prefixes."""

    kind: str
    server: Any
    """`None` for a kind without a server."""

    def settings(self, folder: Path, **more: Any) -> StoreTable:
        """Return the settings of a store; a kind without a server stores its file in `folder`."""
        return {"kind": self.kind, **KINDS[self.kind].settings(self.server, folder), **more}


@contextmanager
def open_home(kind: str) -> Iterator[Home]:
    """Start a server with all tables for the duration of the block."""
    os.environ.update(KINDS[kind].env)
    with KINDS[kind].server() as server, tempfile.TemporaryDirectory(prefix="idem-home-") as name:
        home = Home(kind, server)
        if KINDS[kind].has_tables:
            _migrate(home.settings(Path(name)), Path(name) / "settings.toml")
        yield home


def _migrate(settings: StoreTable, file: Path) -> None:
    file.write_text(as_toml(settings))
    command = [sys.executable, "-m", "integr8s_idem", "store", "migrate", "--settings", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def as_toml(settings: StoreTable) -> str:
    """Return the section `[store]` of a settings file."""
    # Strings, numbers and lists of them have the same syntax in TOML and JSON.
    return "[store]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


@asynccontextmanager
async def open_records(settings: StoreTable, key_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    """Open the store of a service with these settings."""
    async with open_store(_settings.validate_python(settings), key_prefix=key_prefix) as store:
        yield store
