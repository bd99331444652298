"""Publish events from plain code, in its own SQLAlchemy transaction: endpoints, cron jobs, scripts.

    outbox = Outbox(settings, service="shop")            # once per process

    async with session.begin():
        session.add(order)
        async with outbox(session) as out:
            out.publish(OrderPlaced(order_id=order.id))

The events are rows of the outbox until a relay has published them: that of a worker, or `integr8s-idem relay`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, overload

from integr8s_idem._util.context_vars import RUN
from integr8s_idem.config import Settings
from integr8s_idem.config.message_text import lacking
from integr8s_idem.errors import ApplicationError, EventTooLargeError
from integr8s_idem.events import BaseEvent, Message, derived_event_id
from integr8s_idem.keys.fingerprints import fingerprint_of
from integr8s_idem.telemetry import Observer
from integr8s_idem.worker.publisher import EventPublisher

try:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.exc import DBAPIError
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from integr8s_idem.integrations.outbox_transactions import BlockTransaction
    from integr8s_idem.stores.sql.errors import translate_in_transaction
    from integr8s_idem.stores.sql.outbox_rows import put_with_hint
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(lacking(__name__, "sql", error), name=error.name) from error

if TYPE_CHECKING:
    from integr8s_idem.engine.active_runs import ActiveRun

__all__ = ["AsyncOutboxBlock", "Outbox", "OutboxBlock", "OutgoingEvents"]

AsyncHeld: TypeAlias = "AsyncSession | AsyncConnection | async_scoped_session[Any]"
SyncHeld: TypeAlias = "Session | Connection | scoped_session[Any]"

_ENDED: Final = "this block of the outbox has ended, so the event would be lost: publish within the block"


class Outbox:
    """Writes events in transactions of the application.  One object serves the whole process; it opens nothing."""

    def __init__(self, settings: Settings, *, service: str, observer: Observer | None = None) -> None:
        """
        Args:
            settings: Names topics (`kafka.topic_prefix`) and limits the size of events, as for workers.
            service: Name of the publishing service, in the metadata of events and in ids derived from `id_from`.
            observer: Adds the headers of the current trace; by default, one that does so if the process has an SDK.

        Raises:
            ApplicationError: `settings` are not the settings of a process, or `service` is not a name.
        """
        given: tuple[object, object] = settings, service
        if not isinstance(given[0], Settings):
            raise ApplicationError(
                'an outbox needs the settings, as in Outbox(load_settings(), service="shop"), not '
                f"{type(given[0]).__name__}"
            )
        if not isinstance(given[1], str) or not given[1].strip():
            raise ApplicationError(
                f'an outbox needs the name of the service that publishes, as in service="shop", not {given[1]!r}'
            )
        self._messages = EventPublisher(settings.kafka, observer)  # only encodes, and never connects
        self._limit = settings.kafka.max_event_bytes
        self._service = service

    @overload
    def __call__(self, held: AsyncHeld) -> AsyncOutboxBlock: ...

    @overload
    def __call__(self, held: SyncHeld) -> OutboxBlock: ...

    def __call__(self, held: Any) -> AsyncOutboxBlock | OutboxBlock:
        """Return a block that writes its events in the current transaction of `held` when it ends without an error.

        Nothing is committed: the events exist if and when you commit.  If no transaction has begun, the write begins
        one.  `async with` for an asynchronous session or connection, `with` for a synchronous one.

        Raises:
            ApplicationError: `held` is not a session or a connection.
        """
        if isinstance(held, async_scoped_session | scoped_session):
            held = held()
        if isinstance(held, AsyncSession | AsyncConnection):
            return AsyncOutboxBlock(held, self._events(held))
        if isinstance(held, Session | Connection):
            return OutboxBlock(held, self._events(held))
        hint = ", whose transaction is unknown" if isinstance(held, Engine | AsyncEngine) else ""
        raise ApplicationError(
            f"an outbox writes with a session or a connection of SQLAlchemy, not with {type(held).__name__}{hint}: "
            "pass the one that your own writes use"
        )

    def _events(self, held: AsyncSession | AsyncConnection | Session | Connection) -> OutgoingEvents:
        return OutgoingEvents(self._messages, self._service, self._limit, held)


class OutgoingEvents:
    """The events of one block, in the order of the calls."""

    def __init__(
        self,
        publisher: EventPublisher,
        service: str,
        limit: int,
        held: AsyncSession | AsyncConnection | Session | Connection,
    ) -> None:
        self._publisher = publisher
        self._service = service
        self._limit = limit
        self.transaction = BlockTransaction(held, self.write)
        """The transaction in which the events are published."""
        self._messages: list[Message] = []
        """The encoded events that are not written yet."""
        self._by_id: dict[tuple[str, str], BaseEvent] = {}
        """All events of the block, by type and id."""
        self.has_ended = False
        """Whether the block has ended, so that further events are refused."""

    def publish(self, event: BaseEvent, *, id_from: str | None = None) -> str:
        """Publish `event` once the transaction has committed, and return its id.

        The id is stored with the event, so however often a relay sends it, consumers recognize the duplicates.  It is
        the one that you set; or derived from `id_from`; or, within a guarded run, derived from the key of the run and
        the order of the calls in it, so that another run publishes the same ids; otherwise random.

        The same event again, with the same id and the same payload, is written once.

        Args:
            event: Its `aggregate_id` is the Kafka key, within which order is kept.
            id_from: Identifies what happened, such as an order number, among events of this service and type.

        Raises:
            TypeError: `event` is not an event.
            EventError: The event contains NaN or infinity.
            EventTooLargeError: The event is larger than `max_event_bytes`.
            ApplicationError: The block has ended, another savepoint or transaction has begun within it, the event has
                both an id and `id_from`, or another event of the block has its type and id.
        """
        if self.has_ended:
            raise ApplicationError(_ENDED)
        if not isinstance(event, BaseEvent):
            raise TypeError(
                f"publish() takes an event, an instance of a subclass of BaseEvent such as OrderPlaced(...), not "
                f"{type(event).__name__}"
            )
        own = event.metadata
        metadata = own.model_copy(update={"service_name": own.service_name or self._service})
        event_id = self._id_of(event, id_from)
        message = self._publisher.message(event.model_copy(update={"event_id": event_id, "metadata": metadata}))
        self._refuse_too_large(message)
        is_repeated = self._is_repeated(event, event_id)
        self.transaction.note_event()
        if not is_repeated:
            self._by_id[event.event_type, event_id] = event
            self._messages.append(message)
        return event_id

    def end(self, error: BaseException | None) -> bool:
        """End the block, and return whether events remain to be written.

        Raises:
            ApplicationError: They cannot share the outcome of their transaction.
        """
        self.has_ended = True
        self.transaction.end()
        if error is not None:
            return False
        if not self._messages:
            self.transaction.check_outcome()
            return False
        self.transaction.check()
        return True

    def write(self, connection: Connection) -> None:
        """Write the events that are not written yet, with the errors of a block."""
        _write(connection, self._messages)
        self._messages.clear()

    def _refuse_too_large(self, message: Message) -> None:
        # The broker would refuse it each time, and the later events of its Kafka key would wait for ever.
        headers = sum(len(name) + len(value) for name, value in message.headers)
        size = len(message.value) + len(message.key or b"") + headers
        if size > self._limit:
            raise EventTooLargeError(message.topic, size, self._limit)

    def _is_repeated(self, event: BaseEvent, event_id: str) -> bool:
        earlier = self._by_id.get((event.event_type, event_id))
        if earlier is None:
            return False
        if fingerprint_of(earlier) != fingerprint_of(event):
            # Consumers would dead-letter it as `key_reused`.
            raise ApplicationError(
                f"{type(event).__name__} has the id {event_id} of another event of this block, whose payload differs: "
                "give each event an event_id or id_from= of its own"
            )
        return True

    def _id_of(self, event: BaseEvent, id_from: str | None) -> str:
        if "event_id" in event.model_fields_set:
            if id_from is not None:
                raise ApplicationError(f"{type(event).__name__} has the event_id {event.event_id}: remove id_from=")
            return event.event_id
        if id_from is not None:
            if not id_from:
                raise ApplicationError("id_from= is empty: all such events would have one id")
            return derived_event_id(f"outbox:{self._service}:{event.event_type}:{id_from}", 0)
        run: ActiveRun | None = RUN.get()
        if run is None or run.is_over:
            return event.event_id
        # Apart from those of `Outgoing`, which counts its own calls.
        return derived_event_id(f"{run.attempt.key}#outbox", run.next_outbox_index())


class _Block:
    def __init__(self, events: OutgoingEvents) -> None:
        self._events = events
        self._is_used = False

    def _begin(self) -> OutgoingEvents:
        if self._is_used:
            raise ApplicationError("a block of the outbox is used once: call outbox(session) for each block")
        self._is_used = True
        self._events.transaction.begin()
        return self._events


class AsyncOutboxBlock(_Block):
    """`async with outbox(session) as out`: writes the events of the block at its end, unless it raises an error.

    If the transaction commits before that, they are written immediately before the commit.
    """

    def __init__(self, held: AsyncSession | AsyncConnection, events: OutgoingEvents) -> None:
        super().__init__(events)
        self._held = held

    async def __aenter__(self) -> OutgoingEvents:
        """Begin the block.

        Raises:
            ApplicationError: It was used before.
        """
        return self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the events, if there are any and the block has succeeded.

        Raises:
            ApplicationError: The connection commits each statement on its own, or the transaction in which the events
                were published was rolled back within the block.
            StoreError: The tables of the outbox are missing or of another version, or the database does not answer.
            TransactionAbortedError: The database aborted the transaction.
        """
        if self._events.end(error):
            held = self._held
            connection = held if isinstance(held, AsyncConnection) else await held.connection()
            await connection.run_sync(self._events.write)


class OutboxBlock(_Block):
    """`with outbox(session) as out`: `AsyncOutboxBlock` for synchronous sessions and connections."""

    def __init__(self, held: Session | Connection, events: OutgoingEvents) -> None:
        super().__init__(events)
        self._held = held

    def __enter__(self) -> OutgoingEvents:
        """Begin the block.

        Raises:
            ApplicationError: It was used before.
        """
        return self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the events, with the errors of `AsyncOutboxBlock`."""
        if self._events.end(error):
            held = self._held
            self._events.write(held if isinstance(held, Connection) else held.connection())


def _write(connection: Connection, messages: list[Message]) -> None:
    _refuse_autocommit(connection)
    try:
        put_with_hint(connection, messages)
    except DBAPIError as error:
        raise translate_in_transaction("publish", error, connection.dialect.name) from error


def _refuse_autocommit(connection: Connection) -> None:
    """Check that a rollback undoes what `connection` writes."""
    commits = connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT"
    if connection.dialect.name == "sqlite":
        if not connection.in_transaction():
            connection.begin()
        driver: Any = connection.connection.driver_connection
        # Without an isolation level, the driver begins no transaction; the engine must have done it.
        commits = commits or (driver.isolation_level is None and not driver.in_transaction)
    if commits:
        raise ApplicationError(
            "this connection commits each statement on its own, so events would be published even if your transaction "
            "is rolled back: use a connection without AUTOCOMMIT, and for SQLite an engine of "
            "integr8s_idem.stores.sql.sql_engine, or one that emits BEGIN as SQLAlchemy's documentation shows"
        )
