"""What does the guard cost in a transaction of the application's?

Each contestant writes one row of the business in one transaction of PostgreSQL, 16 of them at once.  Without a
guard that is all; with one the row and the record of the work commit together.  No contestant is measured that has
not written all.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Literal, Protocol, TypeAlias

import asyncpg
from dishka import FromDishka, Provider, Scope, make_async_container
from sqlalchemy import Column, ColumnElement, LargeBinary, MetaData, Table, Text, func, insert, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from benchmarks.contestants import RESULT, must
from benchmarks.measuring import Flat
from benchmarks.rounds import Comparison, Measured, Options, Tell, Turn, compared, fresh_keys, in_lanes
from benchmarks.servers import DurablePostgres, asked, running
from integr8s_idem import (
    BaseEvent,
    EventDispatcher,
    EventRouter,
    IdempotencyManager,
    IdempotentEventDispatcher,
    Settings,
)
from integr8s_idem.engine.work import Executed
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.records import Completed
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.stores.sql.schema import COMPLETED, records

AT_ONCE: Final = 16
FIGURES: Final = {
    "sql_inbox": ("guarded_core", "bare"),
    "sql_inbox_session": ("guarded_session", "session"),
    "sql_inbox_core": ("guarded_core", "core"),
    "sql_inbox_by_hand": ("guarded_core", "by_hand"),
}
KEYS: Final = tuple(FIGURES)

tables: Final = MetaData()
orders: Final = Table(
    "orders", tables, Column("id", Text, primary_key=True), Column("of", Text), Column("note", Text, nullable=False)
)
inbox: Final = Table("inbox", tables, Column("key", Text, primary_key=True), Column("result", LargeBinary))
RECEIPT: Final = "receipt"
NOTE: Final = "two boxes of oranges, by the back door"


class Contestant(Protocol):
    """Commits one order if `name` is new; if it is not, whoever is guarded answers what he did, or fails."""

    async def order(self, name: str) -> object: ...


class RefusedError(AssertionError):
    """An order is placed already, says who keeps no answer."""


class Bare:
    """asyncpg and its pool: BEGIN, INSERT, COMMIT."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def order(self, name: str) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            said = await connection.execute(
                'INSERT INTO orders (id, "of", note) VALUES ($1, $2, $3)', name, "bare", NOTE
            )
        must(said == "INSERT 0 1", said)


class ByHand:
    """The bare driver with an inbox as one writes it oneself: what a guard without any code of its own would cost.

    No lease, no attempts, no check of the payload, no expiry.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def order(self, name: str) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            said = await connection.execute("INSERT INTO inbox (key) VALUES ($1) ON CONFLICT DO NOTHING", name)
            if said != "INSERT 0 1":
                raise RefusedError(name)
            await connection.execute('INSERT INTO orders (id, "of", note) VALUES ($1, $2, $3)', name, "by_hand", NOTE)
            said = await connection.execute("UPDATE inbox SET result = $2 WHERE key = $1", name, RESULT)
            must(said == "UPDATE 1", said)


class Core:
    """SQLAlchemy Core, without a guard."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def order(self, name: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(insert(orders).values(id=name, of="core", note=NOTE))


class Session:
    """SQLAlchemy's session, without a guard."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def order(self, name: str) -> None:
        async with AsyncSession(self._engine) as session, session.begin():
            await session.execute(insert(orders).values(id=name, of="session", note=NOTE))


class GuardedCore:
    """Core with the guard: `manager.in_transaction(connection)`."""

    def __init__(self, engine: AsyncEngine, manager: IdempotencyManager) -> None:
        self._engine = engine
        self._manager = manager

    async def order(self, name: str) -> str:
        async with self._engine.begin() as connection, self._manager.in_transaction(connection):

            async def place() -> str:
                await connection.execute(insert(orders).values(id=name, of="guarded_core", note=NOTE))
                return RECEIPT

            return await self._manager.run(name, place)


class GuardedSession:
    """The session with the guard: `manager.in_transaction(session)`."""

    def __init__(self, engine: AsyncEngine, manager: IdempotencyManager) -> None:
        self._engine = engine
        self._manager = manager

    async def order(self, name: str) -> str:
        async with AsyncSession(self._engine) as session, session.begin(), self._manager.in_transaction(session):

            async def place() -> str:
                await session.execute(insert(orders).values(id=name, of="guarded_session", note=NOTE))
                return RECEIPT

            return await self._manager.run(name, place)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


class Handler:
    """A handler of the idempotent dispatcher whose session commits with its outcome; reserved in one more."""

    def __init__(self, dispatcher: IdempotentEventDispatcher) -> None:
        self._dispatcher = dispatcher

    async def order(self, name: str) -> object:
        # An order that comes again is the same event.
        [execution] = self._dispatcher.executions(OrderPlaced(event_id=name, order_id=name))
        outcome = await execution.attempt()
        if isinstance(outcome, Completed):
            return json.loads(outcome.result.body) if outcome.result else None
        must(isinstance(outcome, Executed), repr(outcome))
        return RECEIPT


async def place(event: OrderPlaced, session: FromDishka[AsyncSession]) -> str:
    await session.execute(insert(orders).values(id=event.order_id, of="handler", note=NOTE))
    return RECEIPT


Contestants: TypeAlias = Mapping[str, Contestant]
GUARDED: Final = ("guarded_core", "guarded_session", "handler")
BLOCKING: Final = (*GUARDED, "by_hand")
"""Who lets nobody order twice."""


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[Contestants, AsyncEngine]]:
    """All of them on one server that keeps what it acknowledges, each with as many connections as there are at once."""
    server = DurablePostgres()
    async with running(server), AsyncExitStack() as stack:
        store, engine = (sql_engine(server.url, pool_size=AT_ONCE) for _ in range(2))
        for one in (store, engine):
            stack.push_async_callback(one.dispose)
        await migrate(store)
        async with store.begin() as connection:
            await connection.run_sync(tables.create_all)
        pool = await stack.enter_async_context(
            asyncpg.create_pool(
                host=str(server.folder), user="postgres", database="postgres", min_size=AT_ONCE, max_size=AT_ONCE
            )
        )
        repository = SqlIdempotencyRepository(store)
        dispatcher = await stack.enter_async_context(_dispatcher(repository, engine))
        yield contestants(pool, engine, IdempotencyManager(repository=repository, scope="orders"), dispatcher), store


def contestants(
    pool: Any, engine: AsyncEngine, manager: IdempotencyManager, dispatcher: IdempotentEventDispatcher
) -> Contestants:
    """All of them, by the names that their numbers have."""
    return {
        "bare": Bare(pool),
        "by_hand": ByHand(pool),
        "core": Core(engine),
        "session": Session(engine),
        "guarded_core": GuardedCore(engine, manager),
        "guarded_session": GuardedSession(engine, manager),
        "handler": Handler(dispatcher),
    }


@asynccontextmanager
async def _dispatcher(
    repository: IdempotencyRepository, engine: AsyncEngine
) -> AsyncIterator[IdempotentEventDispatcher]:
    async def session() -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(engine) as session:
            error = yield session
            if error is None:
                await session.commit()

    router, provider = EventRouter(), Provider()
    router.on(OrderPlaced)(place)
    provider.provide(session, scope=Scope.REQUEST)
    provider.provide(lambda: repository, provides=IdempotencyRepository, scope=Scope.APP, override=True)
    container = make_async_container(
        TelemetryProvider(),
        EventContextProvider(),
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(router, transaction=AsyncSession),
        provider,
        context={Settings: Settings(), ServiceName: ServiceName("orders")},
    )
    try:
        dispatcher = await container.get(EventDispatcher)
        assert isinstance(dispatcher, IdempotentEventDispatcher)
        yield dispatcher
    finally:
        await container.close()


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    async with opened() as (takers, engine):
        placed: dict[str, int] = dict.fromkeys(takers, 0)
        turns = {name: _turn(contestant, name, placed, engine) for name, contestant in takers.items()}
        told = await compared(Comparison("inbox", turns, FIGURES), options, tell)
        await _looked_up(engine, placed)
        version = await asked(engine, "SELECT current_setting('server_version')")
    return told | {"transactions.server": f"PostgreSQL {version}, fsync on, Unix socket"}


def _turn(contestant: Contestant, name: str, placed: dict[str, int], engine: AsyncEngine) -> Turn:
    ids = fresh_keys(f"order-{name}")

    async def turn(seconds: float) -> Measured:
        found = await in_lanes(contestant.order, ids, AT_ONCE, seconds)
        placed[name] += found.events
        if name in BLOCKING:
            await blocks_twice(contestant, next(ids))
            placed[name] += 1
        written = await _count(engine, orders.c.of == name)
        must(written == placed[name], f"{name} has written {written} orders, not {placed[name]}")
        return found

    return turn


async def blocks_twice(contestant: Contestant, name: str) -> None:
    """Raises AssertionError: an order that is placed is neither refused nor answered as before.

    A second row of one name is nothing to look for: the table takes none, and its refusal comes through here.
    """
    await contestant.order(name)
    try:
        answer = await contestant.order(name)
    except RefusedError:
        return
    must(answer == RECEIPT, f"{type(contestant).__name__} answers a duplicate with {answer!r}")


async def _looked_up(engine: AsyncEngine, placed: Mapping[str, int]) -> None:
    """Raises AssertionError: somebody has kept less, or more, than he has written."""
    kept = await _count(engine, records.c.status == COMPLETED)
    wanted = sum(placed[name] for name in GUARDED)
    must(kept == wanted, f"{kept} records, not {wanted}")
    kept = await _count(engine, inbox.c.result == RESULT)
    must(kept == placed["by_hand"], f"{kept} in the inbox, not {placed['by_hand']}")


async def _count(engine: AsyncEngine, which: ColumnElement[bool]) -> int:
    async with engine.connect() as connection:
        return await connection.scalar(select(func.count()).where(which)) or 0
