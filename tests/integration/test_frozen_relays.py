"""A relay whose process is frozen in the middle of a transaction keeps its buckets from others for a limited time."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine

from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.events import Message
from integr8s_idem.stores.outbox import Claim
from integr8s_idem.stores.sql import SqlOutbox, migrate, sql_engine
from integr8s_idem.stores.sql.engine import writing
from integr8s_idem.stores.sql.outbox_rows import put
from tests.support.conditions import eventually
from tests.support.postgres import PostgresServer

MINUTE = timedelta(minutes=1)
TIMEOUT = timedelta(seconds=1)


class Frozen:
    """A process that has claimed the buckets of an outbox, and is frozen before it commits: a loop that is blocked."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.stopped = threading.Event()
        self.resumed = threading.Event()

    async def claims(self) -> Claim | None:
        engine: AsyncEngine = sql_engine(self._url)
        outbox = SqlOutbox(engine, timeout=TIMEOUT)

        @event.listens_for(engine.sync_engine, "before_cursor_execute")
        def freeze(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            if statement.startswith("UPDATE"):
                self.stopped.set()
                assert self.resumed.wait(60)

        try:
            return await outbox.claim(MINUTE)
        finally:
            await engine.dispose()


async def test_buckets_that_a_frozen_relay_has_locked_are_claimed_by_another_one() -> None:
    with PostgresServer() as server:
        engine = sql_engine(server.url)
        await migrate(engine)
        async with writing(engine) as connection:
            await put(connection, [Message("orders", b"k", b"body", (), "event-1", "order_placed")])
        frozen = Frozen(server.url)
        first = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(frozen.claims())))
        await eventually(frozen.stopped.is_set)
        other = SqlOutbox(engine)
        assert await other.claim(MINUTE) is None

        async with asyncio.timeout(30):
            while (claim := await other.claim(MINUTE)) is None:  # noqa: ASYNC110  # the database sends no notification
                await asyncio.sleep(0.05)
        frozen.resumed.set()

        with pytest.raises(StoreUnavailableError):
            await first
        assert await other.done(claim, [], MINUTE)
        await engine.dispose()
