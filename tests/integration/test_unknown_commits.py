"""A database that is lost during the COMMIT of a handler: the outcome is unknown, and nobody is to blame."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from integr8s_idem import EventRouter, IdempotencyConfig, Settings
from integr8s_idem.integrations.dishka import FromDishka
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.worker.dead_letters import PREFIX
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.ledger_shop import OrderPlaced, charge, open_ledger_shop
from tests.support.postgres import PostgresServer

SLOW = """CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_sleep({seconds}); RETURN NULL; END $$"""
IN_COMMIT = """CREATE CONSTRAINT TRIGGER be_slow AFTER INSERT ON charges DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION be_slow()"""
COMMITTING = text("SELECT pid FROM pg_stat_activity WHERE query LIKE 'COMMIT;%' AND wait_event = 'PgSleep'")
ORDERS = Partition("order_placed", 0)
DEAD = Partition("order_placed.dlq", 0)

router = EventRouter()


@router.on(OrderPlaced)
async def bill(event: OrderPlaced, session: FromDishka[AsyncSession]) -> str:
    await charge(session, event)
    return "receipt"


async def commit_slowly(admin: AsyncEngine, seconds: float) -> None:
    """Let each COMMIT of a charge take `seconds`."""
    async with admin.begin() as connection:
        for statement in (SLOW.format(seconds=seconds), IN_COMMIT):
            await connection.execute(text(statement))


async def committing(admin: AsyncEngine) -> int:
    """Wait until a connection is in COMMIT, and return its process."""
    async with asyncio.timeout(30):
        while True:
            async with admin.connect() as connection:
                if (pid := (await connection.execute(COMMITTING)).scalar()) is not None:
                    return int(pid)
            await asyncio.sleep(0.01)


async def strike(server: PostgresServer, admin: AsyncEngine, *, whole_server: bool) -> None:
    """Kill the connection that is in COMMIT, or the server."""
    pid = await committing(admin)
    if whole_server:
        await asyncio.to_thread(server.crash)
        await asyncio.to_thread(server.start_again)
        await admin.dispose()
    else:
        async with admin.connect() as connection:
            await connection.execute(text(f"SELECT pg_terminate_backend({pid})"))


@pytest.mark.parametrize("whole_server", [False, True])
@pytest.mark.parametrize("config", [{"max_attempts": 1}, {"on_failure": "block"}])
async def test_a_commit_without_an_answer_is_not_a_failure_of_the_handler(
    config: Mapping[str, Any], *, whole_server: bool
) -> None:
    with PostgresServer(keeps_commits=True) as server:
        settings = Settings(idempotency=IdempotencyConfig(**config))
        async with open_ledger_shop(server.url, router, settings=settings) as shop:
            admin, broker = sql_engine(server.url), FakeBroker()
            await commit_slowly(admin, 0.5)
            broker.publish(OrderPlaced(order_id="1", event_id="e1"))
            async with running(shop.dispatcher, broker) as worker:
                for _ in range(2):
                    await strike(server, admin, whole_server=whole_server)
                await worker.until(lambda: broker.committed.get(ORDERS) == 1, 60)
            await admin.dispose()

            assert await shop.charged() == ["1"]
            assert not broker.logs.get(DEAD)


async def test_a_commit_that_always_takes_longer_than_the_lease_is_given_up_without_its_writes() -> None:
    settings = Settings(idempotency=IdempotencyConfig(processing_timeout_seconds=1, max_attempts=2))
    with PostgresServer() as server:
        async with open_ledger_shop(server.url, router, settings=settings) as shop:
            admin, broker = sql_engine(server.url), FakeBroker()
            await commit_slowly(admin, 60)
            broker.publish(OrderPlaced(order_id="1", event_id="e1"))
            async with running(shop.dispatcher, broker) as worker:
                await worker.until(lambda: broker.committed.get(ORDERS) == 1, 60)
            await admin.dispose()

            assert await shop.charged() == []
            [dead_letter] = broker.logs[DEAD]
            assert dict(dead_letter.headers)[f"{PREFIX}attempts"] == b"2"
