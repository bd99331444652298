from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from integr8s_idem.errors import PublishError
from integr8s_idem.events import BaseEvent
from services.database import Database, tables
from services.settings import PlatformSection
from tests.support.postgres import PostgresServer

POSTGRES_VARIABLE = "INTEGR8S_IDEM_TEST_POSTGRES"
ON_BOTH = ("test_admission", "test_database", "test_pods", "test_results", "test_saga", "test_transactional")


class RecordingPublisher:
    """Keeps published events; raises `PublishError` while `broken`."""

    def __init__(self) -> None:
        self.events: list[BaseEvent] = []
        self.broken = False

    async def publish(self, *events: BaseEvent) -> None:
        if self.broken:
            raise PublishError("a topic", "the broker is down")
        self.events.extend(events)

    @property
    def types(self) -> list[str]:
        return [event.event_type for event in self.events]


@pytest.fixture
def publisher() -> RecordingPublisher:
    return RecordingPublisher()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of database contents on both databases; the others run scripts on either one."""
    if metafunc.module.__name__.rpartition(".")[2] in ON_BOTH and "database_url" in metafunc.fixturenames:
        metafunc.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Return the URL in INTEGR8S_IDEM_TEST_POSTGRES, or start a server for the session."""
    if named := os.environ.get(POSTGRES_VARIABLE):
        yield named
    else:
        with PostgresServer() as server:
            yield server.url


@pytest.fixture
async def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a database without tables; PostgreSQL is the default if the environment has its URL."""
    kind = getattr(request, "param", "postgresql" if os.environ.get(POSTGRES_VARIABLE) else "sqlite")
    if kind == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path}/platform.db"
    url: str = request.getfixturevalue("postgres_url")
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(tables.drop_all)
    await engine.dispose()
    return url


@pytest.fixture
def settings(tmp_path: Path, database_url: str) -> PlatformSection:
    return PlatformSection(
        database_url=database_url,
        work_folder=str(tmp_path),
        runner="subprocess",
        scripts_as_root=True,  # tests may run as root, with a Python that other users cannot read
        max_running=2,
        max_running_per_user=1,
    )


@pytest.fixture
async def database(settings: PlatformSection) -> AsyncIterator[Database]:
    database = Database(settings.database_url)
    await database.open()
    yield database
    await database.close()
