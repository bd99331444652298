"""Store outgoing events in the database until a relay publishes them.

A handler writes its events in its own transaction, so an event exists only if the transaction committed.  All events
of one Kafka key are in one bucket, and only one relay at a time claims a bucket, so they are published in row order.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta

from sqlalchemy import Executable, Update, case, delete, exists, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError, StoreUnavailableError
from integr8s_idem.events import Message
from integr8s_idem.stores.outbox import Backlog, Claim, Waiting
from integr8s_idem.stores.sql.dialects import dialect_of
from integr8s_idem.stores.sql.engine import autocommit, reading, writing
from integr8s_idem.stores.sql.errors import MIGRATE, guarded
from integr8s_idem.stores.sql.outbox_hints import has_hints, hear_hints
from integr8s_idem.stores.sql.outbox_pages import PageRows, select_page
from integr8s_idem.stores.sql.outbox_rows import insertion, waiting
from integr8s_idem.stores.sql.rows import microseconds
from integr8s_idem.stores.sql.schema import BUCKETS, buckets, outbox
from integr8s_idem.stores.sql.sqlite_engine import handler_turn

_row = outbox.c


class SqlOutbox:
    """`OutboxStore` in the tables of the store."""

    def __init__(self, engine: AsyncEngine, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        self._engine = engine
        self._dialect = dialect_of(engine.dialect.name)
        self._timeout = timeout
        self._page = PageRows()
        self._arrived = asyncio.Event()

    def notice(self) -> None:
        """Report that a transaction with messages has committed."""
        self._arrived.set()

    def turn(self) -> AbstractAsyncContextManager[None]:
        return handler_turn(self._engine)

    @property
    def has_hints(self) -> bool:
        return has_hints(self._engine)

    async def hear_hints(self) -> None:
        await hear_hints(self._engine, self.notice)

    async def arrived(self, at_most: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most):
                await self._arrived.wait()
        self._arrived.clear()

    async def claim(self, length: timedelta) -> Claim | None:
        """Claim buckets, as the protocol describes.

        `length` is truncated to microseconds, and counts from the statement that claims the buckets.
        """
        now, times = self._dialect.now, self._dialect.time_parameters()
        has_rows = exists().where(outbox.c.bucket == buckets.c.bucket)
        unclaimed = select(buckets.c.bucket).where(buckets.c.claimed_until <= now, has_rows).order_by(buckets.c.bucket)
        token = secrets.token_bytes(16)
        async with (
            self.turn(),
            guarded("claim", self._timeout, self._dialect.name),
            self._writing() as connection,
        ):
            locking = unclaimed.with_for_update(skip_locked=True, of=buckets)
            found = tuple((await connection.scalars(locking, times)).all())
            if not found:
                return None
            until = now + microseconds(length)
            await connection.execute(self._update_buckets(found).values(token=token, claimed_until=until), times)
            newest = select(_row.id).where(_row.bucket.in_(found)).order_by(_row.id.desc()).limit(1)
            last = await connection.scalar(newest)
        return Claim(token, found, last or 0)

    async def read(self, claim: Claim, *, after: int = 0, besides: Sequence[str] = ()) -> list[Waiting]:
        query = select_page(claim, after, besides, self._page.count)
        try:
            async with (
                guarded("read", self._timeout, self._dialect.name),
                autocommit(self._engine, reads_only=True) as connection,
            ):
                rows = (await connection.execute(query)).all()
        except StoreUnavailableError:
            self._page.was_not_read()
            raise
        self._page.was_read(rows)
        return [waiting(row) for row in rows]

    async def done(self, claim: Claim, ids: Sequence[int], length: timedelta) -> bool:
        now, times = self._dialect.now, self._dialect.time_parameters()
        claimed = self._update_buckets(claim.buckets).where(buckets.c.token == claim.token)
        async with (
            self.turn(),
            guarded("done", self._timeout, self._dialect.name),
            self._writing() as connection,
        ):
            if ids and not self._dialect.reuses_ids:
                # These are published, even if another relay owns the bucket by now.
                await connection.execute(self._delete_rows(sorted(ids)))
            extended = await connection.execute(claimed.values(claimed_until=now + microseconds(length)), times)
            is_held = bool(extended.rowcount == len(claim.buckets))
            if ids and is_held and self._dialect.reuses_ids:
                # Otherwise another relay has deleted them, and new messages may have their ids.
                await connection.execute(self._delete_rows(sorted(ids)))
            return is_held

    @asynccontextmanager
    async def _writing(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that locks buckets.

        PostgreSQL ends it if this process is frozen within it, so that other relays get its buckets.
        """
        async with writing(self._engine) as connection:
            if self._dialect.name == "postgresql":
                limit = str(int(self._timeout.total_seconds() * 1000) + 1)  # a running process gives up before
                await connection.execute(select(func.set_config("idle_in_transaction_session_timeout", limit, True)))
            yield connection

    def _update_buckets(self, found: Sequence[int]) -> Update:
        change = update(buckets).where(buckets.c.bucket.in_(found))
        return change.with_hint(self._dialect.primary_key_hint) if self._dialect.primary_key_hint else change

    def _delete_rows(self, ids: Sequence[int]) -> Executable:
        if not self._dialect.primary_key_hint:
            return delete(outbox).where(_row.id.in_(ids))
        # With IN, MariaDB scans the whole table and waits for rows of open transactions.
        values, name = " UNION ALL ".join(f"SELECT {int(row_id)}" for row_id in ids), outbox.name
        return text(
            f"DELETE {name} FROM (SELECT NULL AS id FROM DUAL WHERE FALSE UNION ALL {values}) AS published "  # noqa: S608  # integers
            f"STRAIGHT_JOIN {name} {self._dialect.primary_key_hint} ON {name}.id = published.id"
        )

    async def check(self) -> None:
        count = select(func.count()).select_from(buckets).where(buckets.c.bucket.in_(range(BUCKETS)))
        async with guarded("start", self._timeout, self._dialect.name), reading(self._engine) as connection:
            await connection.execute(select(outbox.c.id).limit(1))
            found = (await connection.execute(count)).scalar_one()
        if found < BUCKETS:
            reason = (
                f"{BUCKETS - found} of the {BUCKETS} rows of {buckets.name} are missing, so their events "
                f"are never published; {MIGRATE}"
            )
            raise StoreConfigurationError("start", reason, Code.SCHEMA_MISSING)

    async def count(self) -> int:
        async with (
            guarded("count", self._timeout, self._dialect.name),
            autocommit(self._engine, reads_only=True) as connection,
        ):
            return int((await connection.execute(select(func.count()).select_from(outbox))).scalar_one())

    async def backlog(self) -> Backlog:
        now, times = self._dialect.now, self._dialect.time_parameters()
        # Rows of earlier versions have no time.
        oldest = func.min(case((_row.created_at > 0, _row.created_at)))
        query = select(func.count(), oldest, now).select_from(outbox)
        async with (
            guarded("count", self._timeout, self._dialect.name),
            autocommit(self._engine, reads_only=True) as connection,
        ):
            count, since, at = (await connection.execute(query, times)).one()
        return Backlog(count, timedelta(microseconds=max(0, at - since)) if since is not None else timedelta(0))

    async def tried(self) -> None:
        statement, [row] = insertion(
            self._dialect.name, [Message("doctor", None, b"", [], secrets.token_hex(16), "doctor")]
        )
        inserted = select(_row.id).where(_row.bucket == row["bucket"], _row.event_id == row["event_id"])
        unchanged = self._update_buckets([row["bucket"]]).values(claimed_until=buckets.c.claimed_until)
        async with guarded("try", self._timeout, self._dialect.name), self._engine.connect() as connection:
            await connection.execute(statement, [row])
            await connection.execute(unchanged)
            await connection.execute(self._delete_rows((await connection.scalars(inserted)).all()))
            await connection.rollback()
