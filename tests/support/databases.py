"""Fixtures: one PostgreSQL and one MariaDB for the whole session, for tests that empty what they find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.mariadb import MariadbServer, missing_programs
from tests.support.postgres import PostgresServer

KINDS: Final = ("postgresql", "mysql", "sqlite")
"""Of databases that a transaction can be joined in."""


@pytest.fixture(scope="session")
def shared_postgres() -> Iterator[PostgresServer]:
    """Never stop or configure it: start one of your own."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def shared_mariadb() -> Iterator[MariadbServer]:
    """Never stop or configure it: start one of your own."""
    if why := missing_programs():
        pytest.skip(why)
    with MariadbServer() as server:
        yield server


def url_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """Of a database of this kind, with whatever the test before has left in it."""
    if kind == "sqlite":
        return f"sqlite+aiosqlite:///{folder / 'shop.db'}"
    url: str = request.getfixturevalue("shared_mariadb" if kind == "mysql" else "shared_postgres").url
    return url
