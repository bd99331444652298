"""Plain code and relays are killed (SIGKILL) between the commit and the broker, on real databases and a real Kafka."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import Settings
from integr8s_idem.config import KafkaSettings
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.stores.sql import metadata, migrate, sql_engine
from integr8s_idem.stores.sql.engine import reading
from integr8s_idem.stores.sql.schema import buckets, outbox
from tests.support.databases import KINDS, url_of
from tests.support.kafka import Kafka
from tests.support.outbox_writer import CREATE, OrderPlaced, place
from tests.support.processes import ServiceProcess

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(400)]

KEYS = ("a", "b", "c", "d")
ENOUGH = 1_000_000
"""Orders for each key that no test reaches."""


@dataclass
class Shop:
    """A database, a topic, and the processes that write to the one and publish to the other."""

    url: str
    engine: AsyncEngine
    kafka: Kafka
    prefix: str
    folder: Path
    writers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    relays: list[ServiceProcess] = field(default_factory=list)

    def writer(self, *keys: str, last: int = ENOUGH) -> subprocess.Popen[bytes]:
        arguments = [self.url, self.prefix, str(last), *keys]
        self.writers.append(subprocess.Popen([sys.executable, "-m", "tests.support.outbox_writer", *arguments]))
        return self.writers[-1]

    def relay(self, *options: str) -> ServiceProcess:
        (self.folder / "settings.toml").write_text(
            f'[kafka]\nbootstrap_servers = "{self.kafka.bootstrap}"\n'
            f'[store]\nkind = "{self.engine.dialect.name}"\n{self._place()}\n'
            "[telemetry]\nmetrics_enabled = false\n"
        )
        settings = f"--settings={self.folder / 'settings.toml'}"
        log = self.folder / f"relay-{len(self.relays)}.log"
        self.relays.append(ServiceProcess(settings, *options, command="relay", log=log))
        return self.relays[-1]

    def _place(self) -> str:
        if self.engine.dialect.name == "sqlite":
            return f'path = "{self.engine.url.database}"'
        return f'url = "{self.url}"'

    async def count(self) -> int:
        """Return how many orders are committed."""
        async with reading(self.engine) as connection:
            return int(await connection.scalar(text("SELECT count(*) FROM placed")) or 0)

    async def waiting(self) -> int:
        async with reading(self.engine) as connection:
            return int(await connection.scalar(select(func.count()).select_from(outbox)) or 0)

    async def confirmed(self) -> int:
        """Return a lower bound of the events that relays have deleted because the broker has confirmed them."""
        return await self.count() - await self.waiting()

    async def wait_until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for other processes to make `condition` true.

        Raises:
            AssertionError: A writer failed, a relay ended, or two minutes passed; the message has the relays' output.
        """
        try:
            async with asyncio.timeout(120):
                while not await condition():  # the processes send no notification
                    assert all(writer.poll() in {None, 0, -SIGKILL} for writer in self.writers), self._output()
                    assert all(relay.status in {None, -SIGKILL} for relay in self.relays), self._output()
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not true in two minutes: {condition.__qualname__}\n{self._output()}") from None

    def _output(self) -> str:
        return "\n".join(f"relay {relay.pid} ({relay.status}):\n{relay.output}" for relay in self.relays)

    async def end_claims(self) -> None:
        """Let the claims of dead relays end, which takes a minute otherwise."""
        async with self.engine.begin() as connection:
            await connection.execute(update(buckets).values(claimed_until=0))

    async def placed(self) -> dict[str, list[str]]:
        """Return the event ids of the committed orders of each key, in their order."""
        async with reading(self.engine) as connection:
            rows = await connection.execute(text("SELECT order_key, event_id FROM placed ORDER BY order_key, number"))
            found: dict[str, list[str]] = {}
            for key, event_id in rows:
                found.setdefault(key, []).append(event_id)
            return found

    async def published(self) -> dict[str, list[str]]:
        """Return the event ids of each key in the topic, in their order, with duplicates."""
        consumer = AIOKafkaConsumer(bootstrap_servers=self.kafka.bootstrap)
        await consumer.start()
        found: dict[str, list[str]] = {}
        try:
            here = TopicPartition(f"{self.prefix}order_placed", 0)
            consumer.assign([here])
            await consumer.seek_to_beginning(here)
            end = (await consumer.end_offsets([here]))[here]
            while await consumer.position(here) < end:
                message = await consumer.getone()
                assert message.value is not None
                assert message.key is not None
                event = OrderPlaced.model_validate_json(message.value)
                found.setdefault(message.key.decode(), []).append(event.event_id)
        finally:
            await consumer.stop()
        return found


@pytest.fixture(params=KINDS)
async def shop(request: pytest.FixtureRequest, kafka: Kafka, topic_prefix: str, tmp_path: Path) -> AsyncIterator[Shop]:
    url = url_of(request.param, request, tmp_path)
    engine = sql_engine(url, lock_timeout_seconds=20)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.drop_all)
        await connection.execute(text("DROP TABLE IF EXISTS placed"))
        await connection.execute(text(CREATE))
    await migrate(engine)
    await kafka.create_topics({f"{topic_prefix}order_placed": 1})
    yield Shop(url, engine, kafka, topic_prefix, tmp_path)
    await engine.dispose()


async def count_reaches(shop: Shop, count: int) -> None:
    """Wait until so many orders are committed."""

    async def reached() -> bool:
        return await shop.count() >= count

    await shop.wait_until(reached)


def kill(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


async def suspend(shop: Shop, relay: ServiceProcess) -> None:
    """Suspend a relay outside of a transaction, whose locks would stop the other one, and end its claims."""
    impatient = sql_engine(shop.url, lock_timeout_seconds=0.5)
    while True:
        relay.stop_signal()
        try:
            async with impatient.begin() as connection:
                await connection.execute(update(buckets).values(claimed_until=0))
            break
        except DBAPIError:
            relay.continue_signal()
            # If it was stopped again at once, its transaction would never end.
            await shop.end_claims()
    await impatient.dispose()


async def more_is_confirmed(shop: Shop) -> None:
    """Wait until a relay has published more events."""
    before = await shop.confirmed()

    async def confirmed() -> bool:
        return await shop.confirmed() > before

    await shop.wait_until(confirmed)


async def drain(shop: Shop) -> None:
    await shop.end_claims()
    relay = shop.relay("--once", "--json")
    assert relay.wait(120) == 0, relay.output
    assert await shop.waiting() == 0


@pytest.mark.scenario(141)
async def test_events_of_a_process_killed_after_its_commit_are_published(shop: Shop) -> None:
    writer = shop.writer(*KEYS)
    await count_reaches(shop, 20)
    kill(writer)
    committed = await shop.placed()
    assert await shop.waiting() == sum(map(len, committed.values()))

    await drain(shop)

    assert await shop.published() == committed


@pytest.mark.scenario(142)
async def test_kills_of_writers_and_of_relays_also_suspended_ones_lose_nothing_and_keep_the_order_of_each_key(
    shop: Shop,
) -> None:
    """Duplicates have the id of the event that they repeat, so that its next guard drops them."""
    for is_first in (True, False):
        before = await shop.count()
        writers = [shop.writer(*KEYS[:2]), shop.writer(*KEYS[2:])]
        relays = [shop.relay(), shop.relay()]
        await more_is_confirmed(shop)
        if is_first:
            await suspend(shop, relays[0])
            await more_is_confirmed(shop)
            relays[0].continue_signal()
        await count_reaches(shop, before + random.randint(40, 120))
        processes: list[subprocess.Popen[bytes] | ServiceProcess] = [*writers, *relays]
        for process in random.sample(processes, 4):
            process.kill()
        for writer in writers:
            writer.wait()
        await shop.end_claims()
    await drain(shop)

    committed, published = await shop.placed(), await shop.published()

    assert {key: list(dict.fromkeys(ids)) for key, ids in published.items()} == committed


async def place_large_orders(shop: Shop) -> None:
    """Commit 120 orders, each with an event of about a megabyte."""
    outbox = Outbox(Settings(kafka=KafkaSettings(topic_prefix=shop.prefix)), service="shop")
    for _ in range(30):
        for key in KEYS:
            async with AsyncSession(shop.engine) as session, session.begin():
                assert await place(session, outbox, key, ENOUGH, note="x" * 1_000_000)


@pytest.mark.scenario(142)
async def test_a_backlog_of_large_events_is_published_although_relays_are_killed(shop: Shop) -> None:
    await place_large_orders(shop)
    for _ in range(2):
        relay = shop.relay()
        await more_is_confirmed(shop)
        relay.kill()
        assert await shop.waiting()
        await shop.end_claims()
    await drain(shop)

    committed, published = await shop.placed(), await shop.published()

    assert {key: list(dict.fromkeys(ids)) for key, ids in published.items()} == committed


@pytest.mark.scenario(142)
async def test_two_relays_at_once_publish_each_event_once(shop: Shop) -> None:
    relays = [shop.relay(), shop.relay()]
    for relay in relays:
        relay.wait_for_line("publishing the events of the outbox")
    writers = [shop.writer(key, last=20) for key in KEYS]
    for writer in writers:
        assert writer.wait() == 0
    await count_reaches(shop, 80)
    for relay in relays:
        relay.terminate()
        assert relay.wait(60) == 0, relay.output
    await drain(shop)

    committed = await shop.placed()

    assert await shop.published() == committed
    assert {len(ids) for ids in committed.values()} == {20}
