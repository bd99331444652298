"""What does the guard cost in the application's own transaction?

Each contestant writes one business row per PostgreSQL transaction, 16 at once. With a guard, the row and the record
commit together. A contestant that has not written all its rows fails the run.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Literal, Protocol, TypeAlias

import asyncpg
from dishka import FromDishka, Provider, Scope, make_async_container
from sqlalchemy import (
    Column,
    ColumnElement,
    LargeBinary,
    MetaData,
    Table,
    Text,
    bindparam,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from benchmarks.contestants import LEASE, RESULT, RETENTION, TTL, ensure
from benchmarks.measuring import Flat
from benchmarks.rounds import Comparison, Measured, Options, Progress, Turn, compare, fresh_keys, run_concurrently
from benchmarks.servers import DurablePostgres, query, running
from integr8s_idem import (
    BaseEvent,
    EventDispatcher,
    EventRouter,
    IdempotencyManager,
    IdempotentEventDispatcher,
    Settings,
)
from integr8s_idem._util.tokens import new_token
from integr8s_idem.engine.work import Executed
from integr8s_idem.integrations.dishka import (
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.records import JSON, Completed, Completion, Reserved, ReserveRequest, StoredResult
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.sql import SqlIdempotencyRepository, migrate, sql_engine
from integr8s_idem.stores.sql.driver_cursors import CompiledStatement, execute_in_transaction
from integr8s_idem.stores.sql.schema import COMPLETED, records

CONCURRENCY: Final = 16
FIGURES: Final = {
    "sql_inbox": ("guarded_core", "bare"),
    "sql_inbox_session": ("guarded_session", "session"),
    "sql_inbox_core": ("guarded_core", "core"),
    "sql_inbox_by_hand": ("guarded_core", "by_hand"),
    "sql_inbox_statements": ("core_with_statements", "core"),
    "sql_inbox_store": ("core_with_store", "core"),
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
    """Commits one order if `name` is new; a guarded contestant otherwise returns the stored result, or fails."""

    async def order(self, name: str) -> object: ...


class RefusedError(AssertionError):
    """The order exists already, and no result is stored."""


class Bare:
    """asyncpg and its pool: BEGIN, INSERT, COMMIT."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def order(self, name: str) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            status = await connection.execute(
                'INSERT INTO orders (id, "of", note) VALUES ($1, $2, $3)', name, "bare", NOTE
            )
        ensure(status == "INSERT 0 1", status)


class ByHand:
    """The bare driver with a hand-written inbox: a lower bound for the cost of a guard.

    No lease, no attempts, no check of the payload, no expiry.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    async def order(self, name: str) -> None:
        async with self._pool.acquire() as connection, connection.transaction():
            status = await connection.execute("INSERT INTO inbox (key) VALUES ($1) ON CONFLICT DO NOTHING", name)
            if status != "INSERT 0 1":
                raise RefusedError(name)
            await connection.execute('INSERT INTO orders (id, "of", note) VALUES ($1, $2, $3)', name, "by_hand", NOTE)
            status = await connection.execute("UPDATE inbox SET result = $2 WHERE key = $1", name, RESULT)
            ensure(status == "UPDATE 1", status)


class Core:
    """SQLAlchemy Core, without a guard."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def order(self, name: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(insert(orders).values(id=name, of="core", note=NOTE))


class CoreWithStatements:
    """Core with two statements for an inbox on its connection, executed like those of the guard: its lower bound.

    No lease, no attempts, no check of the payload, no expiry.
    """

    _reserve: Final = CompiledStatement(
        postgresql.insert(inbox).values(key=bindparam("key")).on_conflict_do_nothing().returning(inbox.c.key)
    )
    _complete: Final = CompiledStatement(
        update(inbox).values(result=bindparam("outcome")).where(inbox.c.key == bindparam("of")).returning(inbox.c.key)
    )

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def order(self, name: str) -> None:
        async with self._engine.begin() as connection:
            if not (await execute_in_transaction(connection, self._reserve, {"key": name})).rows:
                raise RefusedError(name)
            await connection.execute(insert(orders).values(id=name, of="core_with_statements", note=NOTE))
            completed = await execute_in_transaction(connection, self._complete, {"of": name, "outcome": RESULT})
            ensure(len(completed.rows) == 1, f"{name} is not in the inbox")


class CoreWithStore:
    """Core with the calls of this library's store in its transaction, and nothing else of the guard: its lower bound.

    No key of its own, no check of the payload, no result for duplicates.
    """

    def __init__(self, engine: AsyncEngine, repository: SqlIdempotencyRepository) -> None:
        self._engine = engine
        self._repository = repository

    async def order(self, name: str) -> None:
        async with self._engine.begin() as connection:
            joined = self._repository.joined(connection)
            async with joined.savepoint():
                request = ReserveRequest(key=name, token=new_token(), lease=LEASE, retention=RETENTION)
                [verdict] = await joined.reserve([request])
                if not isinstance(verdict, Reserved):
                    raise RefusedError(name)
                await connection.execute(insert(orders).values(id=name, of="core_with_store", note=NOTE))
                completion = Completion(reservation=verdict, ttl=TTL, result=StoredResult(RESULT, JSON))
                ensure((await joined.complete([completion]))[0], f"{name} is not reserved")


class Session:
    """A SQLAlchemy session, without a guard."""

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
    """A session with the guard: `manager.in_transaction(session)`."""

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
    """A handler of the idempotent dispatcher, whose session commits with the outcome."""

    def __init__(self, dispatcher: IdempotentEventDispatcher) -> None:
        self._dispatcher = dispatcher

    async def order(self, name: str) -> object:
        # A duplicate order is the same event.
        [execution] = self._dispatcher.executions(OrderPlaced(event_id=name, order_id=name))
        outcome = await execution.attempt()
        if isinstance(outcome, Completed):
            return json.loads(outcome.result.body) if outcome.result else None
        ensure(isinstance(outcome, Executed), repr(outcome))
        return RECEIPT


async def place(event: OrderPlaced, session: FromDishka[AsyncSession]) -> str:
    await session.execute(insert(orders).values(id=event.order_id, of="handler", note=NOTE))
    return RECEIPT


Contestants: TypeAlias = Mapping[str, Contestant]
GUARDED: Final = ("guarded_core", "guarded_session", "handler")
BY_HAND: Final = ("by_hand", "core_with_statements")
"""Contestants that write the table `inbox`."""
RECORDING: Final = (*GUARDED, "core_with_store")
"""Contestants that write records."""
BLOCKING: Final = (*RECORDING, *BY_HAND)
"""Contestants that block duplicates."""


@asynccontextmanager
async def open_contestants() -> AsyncIterator[tuple[Contestants, AsyncEngine]]:
    """Start a server that persists what it acknowledges, and open the contestants, each with its own connections."""
    server = DurablePostgres()
    async with running(server), AsyncExitStack() as stack:
        store, engine = (sql_engine(server.url, pool_size=CONCURRENCY) for _ in range(2))
        for created in (store, engine):
            stack.push_async_callback(created.dispose)
        await migrate(store)
        async with store.begin() as connection:
            await connection.run_sync(tables.create_all)
        pool = await stack.enter_async_context(
            asyncpg.create_pool(
                host=str(server.folder),
                user="postgres",
                database="postgres",
                min_size=CONCURRENCY,
                max_size=CONCURRENCY,
            )
        )
        repository = SqlIdempotencyRepository(store)
        dispatcher = await stack.enter_async_context(_dispatcher(repository, engine))
        yield contestants(pool, engine, repository, dispatcher), store


def contestants(
    pool: Any, engine: AsyncEngine, repository: SqlIdempotencyRepository, dispatcher: IdempotentEventDispatcher
) -> Contestants:
    """Return all contestants, by their names in the results."""
    manager = IdempotencyManager(repository=repository, scope="orders")
    return {
        "bare": Bare(pool),
        "by_hand": ByHand(pool),
        "core": Core(engine),
        "core_with_statements": CoreWithStatements(engine),
        "core_with_store": CoreWithStore(engine, repository),
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


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    async with open_contestants() as (contestants_by_name, engine):
        placed: dict[str, int] = dict.fromkeys(contestants_by_name, 0)
        turns = {name: _turn(contestant, name, placed, engine) for name, contestant in contestants_by_name.items()}
        results = await compare(Comparison("inbox", turns, FIGURES), options, progress)
        await _check_records(engine, placed)
        version = await query(engine, "SELECT current_setting('server_version')")
    return results | {"transactions.server": f"PostgreSQL {version}, fsync on, Unix socket"}


def _turn(contestant: Contestant, name: str, placed: dict[str, int], engine: AsyncEngine) -> Turn:
    ids = fresh_keys(f"order-{name}")

    async def turn(seconds: float) -> Measured:
        measured = await run_concurrently(contestant.order, ids, CONCURRENCY, seconds)
        placed[name] += measured.events
        if name in BLOCKING:
            await check_duplicate_is_blocked(contestant, next(ids))
            placed[name] += 1
        written = await _count(engine, orders.c.of == name)
        ensure(written == placed[name], f"{name} wrote {written} orders, not {placed[name]}")
        return measured

    return turn


async def check_duplicate_is_blocked(contestant: Contestant, name: str) -> None:
    """Raise AssertionError unless a duplicate order is refused, or answered with the stored result.

    There is no check for a second row: the table's primary key rejects one.
    """
    await contestant.order(name)
    try:
        answer = await contestant.order(name)
    except RefusedError:
        return
    ensure(answer == RECEIPT, f"{type(contestant).__name__} returns {answer!r} for a duplicate")


async def _check_records(engine: AsyncEngine, placed: Mapping[str, int]) -> None:
    """Raise AssertionError unless the number of records matches the orders written."""
    stored = await _count(engine, records.c.status == COMPLETED)
    expected = sum(placed[name] for name in RECORDING)
    ensure(stored == expected, f"{stored} records, not {expected}")
    stored = await _count(engine, inbox.c.result == RESULT)
    expected = sum(placed[name] for name in BY_HAND)
    ensure(stored == expected, f"{stored} keys in the inbox, not {expected}")


async def _count(engine: AsyncEngine, condition: ColumnElement[bool]) -> int:
    async with engine.connect() as connection:
        return await connection.scalar(select(func.count()).where(condition)) or 0
