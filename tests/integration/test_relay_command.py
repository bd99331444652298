"""`integr8s-idem relay` as a process, with events in a SQLite file and a real Kafka."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import pytest
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import BaseEvent, Settings
from integr8s_idem.config import KafkaSettings
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.stores.sql import migrate, sql_engine
from integr8s_idem.stores.sql.schema import outbox as outbox_table
from tests.support.kafka import Kafka
from tests.support.ports import reserve_port
from tests.support.processes import ServiceProcess

pytestmark = pytest.mark.kafka


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


@dataclass
class Shop:
    engine: AsyncEngine
    settings: Path
    prefix: str

    def write_settings(self, servers: str, more: str = "[telemetry]\nmetrics_enabled = false") -> None:
        self.settings.write_text(
            f'[kafka]\nbootstrap_servers = "{servers}"\nrequest_timeout_seconds = 2\n'
            f'[store]\nkind = "sqlite"\npath = "{self.engine.url.database}"\n{more}\n'
        )

    def relay(self, *options: str) -> ServiceProcess:
        log = self.settings.with_suffix(".log")
        return ServiceProcess(f"--settings={self.settings}", *options, command="relay", log=log)

    async def publish(self, count: int) -> None:
        outbox = Outbox(Settings(kafka=KafkaSettings(topic_prefix=self.prefix)), service="shop")
        async with AsyncSession(self.engine) as session, session.begin(), outbox(session) as out:
            for _ in range(count):
                out.publish(OrderPlaced())

    async def waiting(self) -> int:
        async with self.engine.connect() as connection:
            return len((await connection.scalars(select(outbox_table.c.id))).all())


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Shop]:
    engine = sql_engine(f"sqlite+aiosqlite:///{tmp_path / 'shop.db'}")
    await migrate(engine)
    shop = Shop(engine, tmp_path / "settings.toml", topic_prefix)
    shop.write_settings(kafka.bootstrap)
    yield shop
    await engine.dispose()


async def test_once_publishes_everything_and_prints_the_result_as_json(shop: Shop) -> None:
    await shop.publish(3)

    relay = shop.relay("--once", "--json")
    status = relay.wait(60)

    assert status == 0
    assert json.loads(relay.output) == {"published": 3, "failures": 0, "waiting": 0, "age_seconds": 0.0}
    assert await shop.waiting() == 0


async def test_once_prints_one_line_without_json(shop: Shop) -> None:
    await shop.publish(2)

    relay = shop.relay("--once")

    assert relay.wait(60) == 0
    assert relay.output == "2 events published\n"


async def test_once_exits_with_1_if_the_broker_does_not_accept_the_events(shop: Shop) -> None:
    shop.write_settings(f"127.0.0.1:{reserve_port()}")
    await shop.publish(1)

    relay = shop.relay("--once")

    assert relay.wait(60) == 1
    assert re.search(r"event [0-9a-f-]+ stays in the outbox: ", relay.output)
    assert "0 events published\n1 events wait, the oldest for " in relay.output
    assert await shop.waiting() == 1


async def test_a_relay_publishes_until_sigterm_and_serves_metrics_and_health(shop: Shop, kafka: Kafka) -> None:
    port = reserve_port()
    shop.write_settings(
        kafka.bootstrap,
        f"[telemetry]\nmetrics_port = {port}\nmetrics_host = '127.0.0.1'\nkeys_active_interval_seconds = 1",
    )
    await shop.publish(1)
    relay = shop.relay("--json")
    relay.wait_for_line("publishing the events of the outbox")

    while await shop.waiting():  # noqa: ASYNC110  # another process publishes
        await asyncio.sleep(0.02)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        ready, metrics = await client.get("/readyz"), (await client.get("/metrics")).text
    await shop.publish(1)
    relay.terminate()

    assert relay.wait(60) == 0
    assert await shop.waiting() == 0
    assert ready.status_code == 200
    assert 'idempotency_outbox_waiting{service="relay"}' in metrics
    assert 'idempotency_outbox_age_seconds{service="relay"}' in metrics
    assert 'idempotency_events_published_total{event_type="order_placed",service="relay"} 1.0' in metrics
    assert "stopped after publishing 2 events" in relay.output


async def test_a_store_without_outbox_is_refused(shop: Shop) -> None:
    shop.settings.write_text('[store]\nkind = "memory"\n')

    relay = shop.relay("--once")

    assert relay.wait(60) == 2
    assert '[store] kind is "memory", which has no outbox' in relay.output


async def test_a_relay_without_an_outbox_reports_only_that(shop: Shop) -> None:
    shop.settings.write_text('[store]\nkind = "memory"\n[telemetry]\nmetrics_port = 0\n')

    relay = shop.relay("--json")

    assert relay.wait(60) == 2
    assert "which has no outbox" in relay.output
    assert "metrics and health" not in relay.output


async def test_missing_tables_are_reported(shop: Shop) -> None:
    async with shop.engine.begin() as connection:
        await connection.execute(text("DELETE FROM idempotency_outbox_buckets"))
        await connection.execute(text("DROP TABLE idempotency_store"))
        await connection.execute(
            text("CREATE TABLE idempotency_store (id INTEGER, version INTEGER, identity TEXT, seen_at INTEGER)")
        )
        await connection.execute(text("INSERT INTO idempotency_store VALUES (1, 99, '', 0)"))

    relay = shop.relay("--once")

    assert relay.wait(60) == 1
    assert "has version 99" in relay.output


async def test_a_failing_message_is_counted(shop: Shop, kafka: Kafka) -> None:
    port = reserve_port()
    shop.write_settings(
        f"127.0.0.1:{reserve_port()}", f"[telemetry]\nmetrics_port = {port}\nmetrics_host = '127.0.0.1'"
    )
    await shop.publish(1)
    with shop.relay() as relay:
        relay.wait_for_line("stays in the outbox")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            metrics = (await client.get("/metrics")).text

    assert 'idempotency_outbox_failures_total{event_type="order_placed",service="relay"}' in metrics
