"""Servers, topics and files of one run, and their removal."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from sqlalchemy.engine import make_url

from examples.demo.errors import DemoError
from examples.demo.journal import Journal
from examples.demo.ledger import Ledger
from examples.demo.settings import DATABASE, DemoStore, of_the_run, servers_named_in, write_settings
from integr8s_idem.config import (
    KafkaSettings,
    PostgresqlStoreSettings,
    RedisStoreSettings,
    SqliteStoreSettings,
    StoreSettings,
)
from integr8s_idem.config.urls import without_secret
from integr8s_idem.embedded import EmbeddedPostgres, embedded
from integr8s_idem.events import event_type_of
from integr8s_idem.stores.factory import open_engine
from integr8s_idem.stores.redis.client import redis_client
from integr8s_idem.stores.sql import migrate
from integr8s_idem.worker.client_options import connection_options
from providers.settings import K8S_WORKER, RETRY_TOPICS
from services import events
from services.database import Database

EVENT_TYPES: Final = tuple(
    event_type_of(kind)
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, events.ExecutionEvent) and kind is not events.ExecutionEvent
)
"""The topics of all events of the platform."""

_COMMANDS: Final = ("create_pod_command", "delete_pod_command")
_NAMES: Final = {"redis": "Redis", "sqlite": "SQLite", "postgresql": "PostgreSQL"}
_PARTITIONS: Final = 4
_ADMIN_SECONDS: Final = 10.0
_REMOVAL_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Scenery:
    """Servers, files and names of this run."""

    run: str
    """Prefix of the executions, topics, groups and keys of this run."""
    folder: Path
    settings_file: Path
    kafka: KafkaSettings
    broker: str
    store: str
    journal: Journal
    ledger: Ledger


@asynccontextmanager
async def scenery(settings_file: Path | None, kind: str, *, keep: bool) -> AsyncIterator[Scenery]:
    """Create everything that the services need, and remove it at the end.

    Args:
        settings_file: Settings of a Kafka and a Redis to use; `None` starts embedded servers.
        kind: Kind of the embedded store, one of `STORES`. With SQL, it is the platform's own database.
        keep: Keep the folder with logs, database and journal.

    Raises:
        DemoError, SettingsError, ApplicationError: Something cannot be had; the message says what.
    """
    run = f"demo-{uuid.uuid4().hex[:8]}"
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_folder(keep=keep))
        database_url = f"sqlite+aiosqlite:///{folder / DATABASE}"
        if settings_file is None:
            servers = (await stack.enter_async_context(embedded())).settings()
            if kind == "postgresql":
                database_url = (await stack.enter_async_context(EmbeddedPostgres())).url
            chosen = _store(kind, database_url, RedisStoreSettings(**servers["store"]))
            kafka, store = of_the_run(run, KafkaSettings(**servers["kafka"]), chosen)
            names = ("embedded Kafka (emulator)", f"embedded {_NAMES[kind]}")
        elif kind != "redis":
            raise DemoError(f"--store {kind} selects an embedded store, but {settings_file} names servers")
        else:
            kafka, redis = servers_named_in(settings_file)
            kafka, store = of_the_run(run, kafka, redis)
            names = (f"Kafka at {kafka.bootstrap_servers}", f"Redis at {without_secret(redis.url)}")
            await stack.enter_async_context(_topics(kafka, run))
            await stack.enter_async_context(_keys(redis, run))
        file = folder / "settings.toml"
        write_settings(file, run, kafka, store, database_url)
        await _make_tables(database_url, store)
        journal, ledger = Journal(folder / "journal"), Ledger(database_url)
        yield Scenery(run, folder, file, kafka, *names, journal, ledger)


@contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="idem-demo-"))
    (folder / "work").mkdir()
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the folder. Retried, since supervisors of the last scripts may still clean up in it."""
    until = time.monotonic() + _REMOVAL_SECONDS
    while True:
        try:
            return rmtree(folder)
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


def _store(kind: str, database_url: str, redis: RedisStoreSettings) -> DemoStore:
    url = make_url(database_url)
    match kind:
        case "sqlite":
            return SqliteStoreSettings(kind="sqlite", path=str(url.database))
        case "postgresql":
            address = url.set(drivername="postgresql").render_as_string(hide_password=False)
            return PostgresqlStoreSettings(kind="postgresql", url=address)
    return redis


async def _make_tables(database_url: str, store: StoreSettings) -> None:
    """Create the tables, which the demo reads before the services have started."""
    database = Database(database_url)
    try:
        await database.open()
    finally:
        await database.close()
    if isinstance(store, SqliteStoreSettings | PostgresqlStoreSettings):
        async with open_engine(store) as engine:
            await migrate(engine)


@asynccontextmanager
async def _topics(kafka: KafkaSettings, run: str) -> AsyncIterator[None]:
    """Create topics with several partitions, unless the broker only creates topics on first use."""
    refused = await _make_topics(kafka, run)
    try:
        if refused:
            raise DemoError(f"Kafka at {kafka.bootstrap_servers} refused topics: {'; '.join(refused)}")
        yield
    finally:
        await _forget_topics(kafka)


async def _make_topics(kafka: KafkaSettings, run: str) -> list[str]:
    """Create topics and return the refused ones with the reasons."""
    retries = [f"{command}.{run}.{K8S_WORKER}.retry.{delay}" for command in _COMMANDS for delay in RETRY_TOPICS]
    # Uses the broker's default replication factor.
    wanted = [NewTopic(kafka.topic_prefix + name, _PARTITIONS, -1, {}) for name in (*EVENT_TYPES, *retries)]
    async with _admin(kafka) as admin:
        try:
            answer: Any = await admin.create_topics(wanted)
        except KafkaError as error:
            print(f"topics cannot be created; the broker may create them automatically: {error!r}")
            return []
    return [f"{topic}: {why or code}" for topic, code, why in answer.topic_errors if code]


async def _forget_topics(kafka: KafkaSettings) -> None:
    """Delete the topics of this run, including dead-letter topics."""
    try:
        async with asyncio.timeout(_ADMIN_SECONDS), _admin(kafka) as admin:
            topics = [topic for topic in await admin.list_topics() if topic.startswith(kafka.topic_prefix)]
            await admin.delete_topics(topics)
    except (DemoError, KafkaError, OSError, TimeoutError) as error:
        print(f"topics {kafka.topic_prefix}* were not deleted: {error!r}")


@asynccontextmanager
async def _admin(kafka: KafkaSettings) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(**connection_options(kafka))
    try:
        try:
            await admin.start()
        except (KafkaError, OSError) as error:
            raise DemoError(f"Kafka at {kafka.bootstrap_servers} does not answer: {error}") from error
        yield admin
    finally:
        await admin.close()


@asynccontextmanager
async def _keys(store: RedisStoreSettings, run: str) -> AsyncIterator[None]:
    """Check that Redis answers, and delete the keys of this run at the end."""
    client = redis_client(store)
    try:
        try:
            async with asyncio.timeout(_ADMIN_SECONDS):
                await client.ping()
        except (RedisError, OSError, TimeoutError) as error:
            raise DemoError(f"Redis at {without_secret(store.url)} does not answer: {error}") from error
        try:
            yield
        finally:
            await _forget_keys(client, run)
    finally:
        await client.aclose()


async def _forget_keys(client: Redis, run: str) -> None:
    try:
        async with asyncio.timeout(_ADMIN_SECONDS):
            keys = [key async for key in client.scan_iter(match=f"{run}*", count=1_000)]
            if keys:
                await client.unlink(*keys)
    except (RedisError, OSError, TimeoutError) as error:
        print(f"keys {run}* were not deleted: {error!r}")
