"""The result processor, with records and results in one database."""

from __future__ import annotations

import pytest
from dishka import AsyncContainer
from sqlalchemy import select
from sqlalchemy.engine import make_url

from integr8s_idem import EventDispatcher, IdempotentEventDispatcher
from integr8s_idem.config import PostgresqlStoreSettings, SqliteStoreSettings
from integr8s_idem.engine.work import Executed
from integr8s_idem.records import Completed
from integr8s_idem.runtime import make_container
from integr8s_idem.stores.factory import open_engine
from integr8s_idem.stores.sql import metadata, migrate
from integr8s_idem.stores.sql.schema import outbox
from providers import containers
from providers.settings import PlatformSettings
from services.database import Database, results
from services.events import ExecutionCompleted


def store_of(database_url: str) -> dict[str, str]:
    """Return `[store]` settings for the platform's database."""
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        return {"kind": "sqlite", "path": str(url.database)}
    return {"kind": "postgresql", "url": url.set(drivername="postgresql").render_as_string(hide_password=False)}


@pytest.fixture
async def settings(database_url: str) -> PlatformSettings:
    sections = {"store": store_of(database_url), "platform": {"database_url": database_url}}
    settings = PlatformSettings.model_validate(sections)
    assert isinstance(settings.store, PostgresqlStoreSettings | SqliteStoreSettings)
    async with open_engine(settings.store) as engine:
        async with engine.begin() as connection:
            await connection.run_sync(metadata.drop_all)
        await migrate(engine)
    return settings


async def dispatcher_of(container: AsyncContainer) -> IdempotentEventDispatcher:
    dispatcher = await container.get(EventDispatcher)
    assert isinstance(dispatcher, IdempotentEventDispatcher)
    return dispatcher


async def test_result_record_and_event_are_written_together(settings: PlatformSettings) -> None:
    container = make_container(containers.result_processor, settings)
    dispatcher, database = await dispatcher_of(container), await container.get(Database)
    event = ExecutionCompleted(execution_id="e1")

    [first], [second] = await dispatcher.dispatch(event), await dispatcher.dispatch(event)

    assert first == Executed("completed", 1)
    assert isinstance(second, Completed)
    async with database.reading() as connection:
        assert len((await connection.execute(select(results.c.execution_id))).all()) == 1
        assert (await connection.execute(select(outbox.c.event_type))).scalars().all() == ["result_stored"]
    await container.close()


async def test_only_the_result_processor_is_transactional(settings: PlatformSettings) -> None:
    for service, transactional in (
        (containers.result_processor, True),
        (containers.coordinator, False),
        (containers.k8s_worker, False),
    ):
        container = make_container(service, settings)
        assert ((await dispatcher_of(container)).outbox is not None) is transactional
        await container.close()


@pytest.mark.parametrize(
    ("store", "platform", "together"),
    [
        ({"kind": "sqlite", "path": "a.db"}, "sqlite+aiosqlite:///a.db", True),
        ({"kind": "sqlite", "path": "a.db"}, "sqlite+aiosqlite:///b.db", False),
        ({"kind": "redis"}, "sqlite+aiosqlite:///a.db", False),
        ({"kind": "postgresql", "url": "postgresql://db:5432/shop"}, "postgresql+asyncpg://u:p@db/shop", True),
        ({"kind": "postgresql", "url": "postgresql://db:5432/shop"}, "postgresql+asyncpg://u:p@db/other", False),
        ({"kind": "postgresql", "url": "postgresql://db:5432/shop"}, "sqlite+aiosqlite:///a.db", False),
        ({"kind": "mysql", "url": "mysql://db:3306/shop"}, "postgresql+asyncpg://u:p@db/shop", False),
    ],
)
def test_the_settings_decide_whether_records_are_in_the_platforms_database(
    store: dict[str, str], platform: str, together: bool
) -> None:
    settings = PlatformSettings.model_validate({"store": store, "platform": {"database_url": platform}})

    assert settings.records_are_in_the_platforms_database is together


@pytest.mark.parametrize(
    ("store", "platform", "level", "message"),
    [
        ("postgresql://u:hunter2@db/shop", "postgresql+asyncpg://db:5432/shop", "INFO", "commit together with"),
        (
            "postgresql://localhost/shop",
            "postgresql+asyncpg://u:hunter2@127.0.0.1/shop",
            "WARNING",
            "[store] is localhost:5432/shop, [platform] is 127.0.0.1:5432/shop; if they are the same database",
        ),
        ("postgresql://db/shop", "sqlite+aiosqlite:///platform.db", "INFO", "commit before their records"),
    ],
)
async def test_the_log_reports_whether_records_and_results_commit_together(
    store: str, platform: str, level: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "providers")
    values = {"store": {"kind": "postgresql", "url": store}, "platform": {"database_url": platform}}

    container = make_container(containers.result_processor, PlatformSettings.model_validate(values))
    await container.close()

    (record,) = [one for one in caplog.records if one.name.startswith("providers")]
    assert record.levelname == level
    assert message in record.getMessage()
    assert "hunter2" not in record.getMessage()
