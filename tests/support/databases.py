"""Fixtures: a PostgreSQL and a MariaDB shared by the session, for tests that clear the tables first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.stores.sql import metadata, migrate, sql_engine
from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer

KINDS: Final = ("postgresql", "mysql", "sqlite")
"""Kinds of databases whose transactions can be joined."""


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresServer]:
    """Share a server; never stop or configure it, start your own instead."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_mariadb() -> Iterator[MariadbServer]:
    """Share a server; never stop or configure it, start your own instead."""
    if why := missing_programs():
        pytest.skip(why)
    with MariadbServer() as server:
        yield server


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """Return the URL of a database of this kind, which may contain data of earlier tests."""
    if kind == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'shop.db'}"
    url: str = request.getfixturevalue("shared_mariadb" if kind == "mysql" else "shared_postgres").url
    return url


@asynccontextmanager
async def emptied(url: str) -> AsyncIterator[AsyncEngine]:
    """Open the database of `url` with new tables of the store."""
    engine = sql_engine(url)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(metadata.drop_all)
        await migrate(engine)
        yield engine
    finally:
        await engine.dispose()
