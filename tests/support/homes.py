"""Where records can be: for each kind of store a real server, and settings for whoever wants a store on it.

    with open_home("postgresql") as home:
        async with open_records(home.settings(folder, timeout_seconds=1), "billing") as store:
            ...

Settings are plain data, as under `[store]`: they may travel to another process, and be written into a file.
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
"""What stands under `[store]`."""

CONNECTIONS: Final = 4
"""Of one process to a database, by each of its engines, unless more are needed for a moment."""

LOCK_TIMEOUT: Final = 0.25
"""Seconds; shorter than any worker here waits for an answer."""

WAIT: Final = 0.2
"""Seconds within which a replica has confirmed a write; shorter than any worker here waits for an answer."""

_settings: Final[TypeAdapter[StoreSettings]] = TypeAdapter(StoreSettings)


@dataclass(frozen=True)
class StoreKind:
    """How a kind is had."""

    server: Callable[[], AbstractContextManager[Any]]
    """Runs within its block."""
    settings: Callable[[Any, Path], StoreTable]
    """Of a store on that server, for whoever has the folder for himself; without `kind`."""
    has_tables: bool = False
    """Made once, by the command for it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What a process needs to be let in; set in ours, and in those that it starts."""
    missing: Callable[[], str] = str
    """Why none can be had here; empty if one can."""


def plain(settings: BaseModel) -> StoreTable:
    """What was set of it, but the kind."""
    told: StoreTable = json.loads(json.dumps(settings.model_dump(exclude_unset=True, exclude={"kind"})))
    return told


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
    """Those of `kinds` whose servers can be started here."""
    return tuple(kind for kind in kinds if not KINDS[kind].missing())


@dataclass(frozen=True)
class Home:
    """A server that runs; records of many may be on it, told apart by their prefixes."""

    kind: str
    server: Any
    """None for a kind that needs none."""

    def settings(self, folder: Path, **more: Any) -> StoreTable:
        """Of a store here; `folder` is where a kind without a server puts its file."""
        return {"kind": self.kind, **KINDS[self.kind].settings(self.server, folder), **more}


@contextmanager
def open_home(kind: str) -> Iterator[Home]:
    """A server of our own, ready for records; gone afterwards."""
    os.environ.update(KINDS[kind].env)
    with KINDS[kind].server() as server, tempfile.TemporaryDirectory(prefix="idem-home-") as name:
        home = Home(kind, server)
        if KINDS[kind].has_tables:
            _migrate(home.settings(Path(name)), Path(name) / "settings.toml")
        yield home


def _migrate(settings: StoreTable, file: Path) -> None:
    file.write_text(as_toml(settings))
    command = [sys.executable, "-m", "integr8s_idem", "store", "migrate", "--settings", str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


def as_toml(settings: StoreTable) -> str:
    """The section `[store]` of a file of settings."""
    # A text, a number or a list of them is written in TOML as in JSON.
    return "[store]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


@asynccontextmanager
async def open_records(settings: StoreTable, key_prefix: str) -> AsyncIterator[IdempotencyRepository]:
    """The store that a service with these settings would have."""
    async with open_store(_settings.validate_python(settings), key_prefix=key_prefix) as store:
        yield store
