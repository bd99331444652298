from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from integr8s_idem.errors import PublishError
from integr8s_idem.events import BaseEvent
from services.database import Database, tables
from services.settings import PlatformSection


class RecordingPublisher:
    """Keeps what is published; refuses while `broken`."""

    def __init__(self) -> None:
        self.events: list[BaseEvent] = []
        self.broken = False

    async def publish(self, *events: BaseEvent) -> None:
        if self.broken:
            raise PublishError("a topic", "the broker is away")
        self.events.extend(events)

    @property
    def types(self) -> list[str]:
        return [event.event_type for event in self.events]


@pytest.fixture
def publisher() -> RecordingPublisher:
    return RecordingPublisher()


@pytest.fixture
async def database_url(tmp_path: Path) -> str:
    """A database without tables: a new file, or the PostgreSQL that INTEGR8S_IDEM_TEST_POSTGRES names."""
    url = os.environ.get("INTEGR8S_IDEM_TEST_POSTGRES")
    if url is None:
        return f"sqlite+aiosqlite:///{tmp_path}/platform.db"
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
        max_running=2,
        max_running_per_user=1,
    )


@pytest.fixture
async def database(settings: PlatformSection) -> AsyncIterator[Database]:
    database = Database(settings.database_url)
    await database.open()
    yield database
    await database.close()
