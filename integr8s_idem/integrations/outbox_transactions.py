"""The transaction in which a block of the outbox publishes its events.

Events share the outcome of the transaction in which they are published.  A block writes them at its end, or, if the
transaction commits before that, immediately before the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from integr8s_idem.errors import ApplicationError

Held: TypeAlias = AsyncSession | AsyncConnection | Session | Connection

_OTHER_SAVEPOINT: Final = (
    "this block of the outbox began outside the current savepoint, so its events would be published even if the "
    "savepoint is rolled back: begin a block within the savepoint"
)
_OTHER_TRANSACTION: Final = (
    "the transaction in which events were published was rolled back within the block of the outbox, so they would not "
    "share its outcome, and none is written: end the block before the transaction"
)
_NOT_STARTED: Final = (
    "this connection has not been started, so its transactions are unknown: use `async with engine.connect() as "
    "connection`, and begin the block within it"
)


class BlockTransaction:
    """The transaction of a session or connection during a block, and the savepoint in which the block began."""

    def __init__(self, held: Held, write: Callable[[Connection], None]) -> None:
        """`write` writes the events that are not written yet, if there are any."""
        self._held = held
        self._write = write
        self._savepoint: object = None
        self._published_in: object = None
        self._has_events = False
        self._was_rolled_back = False
        self._listeners: list[tuple[Session | Connection, str, Callable[..., Any]]] = []

    def begin(self) -> None:
        """Note the savepoint in which the block begins."""
        current = self._current()
        self._savepoint = current and current.get_nested_transaction()

    def note_event(self) -> None:
        """Note the transaction in which the first event is published, and check that the others share it.

        Raises:
            ApplicationError: Another savepoint or transaction has begun within the block, or there is no connection.
        """
        current = self._current()
        if current is None:
            raise ApplicationError(_NOT_STARTED)
        if isinstance(current, Session) and current.get_transaction() is None:
            # As the next statement would, without the database, so that a rollback within the block is noticed.
            current.begin()
        if self._published_in is None:
            self._published_in = current.get_transaction()
        self.check()
        self._listen(current)
        self._has_events = True

    def check(self) -> None:
        """Check that the transaction and the savepoint of the events are still the current ones.

        Raises:
            ApplicationError: They are not.
        """
        self._check_transaction()
        current = self._current()
        if current is not None and current.get_nested_transaction() is not self._savepoint:
            raise ApplicationError(_OTHER_SAVEPOINT)

    def end(self) -> None:
        """Forget the events, and commits from now on."""
        self._has_events = False
        for target, name, listener in self._listeners:
            sqlalchemy_event.remove(target, name, listener)
        self._listeners.clear()

    def _current(self) -> Session | Connection | None:
        if isinstance(self._held, AsyncSession):
            return self._held.sync_session
        if isinstance(self._held, AsyncConnection):
            return self._held.sync_connection
        return self._held

    def _check_transaction(self) -> None:
        current = self._current()
        is_another = self._published_in is not None and (
            current is None or current.get_transaction() is not self._published_in
        )
        if is_another or self._was_rolled_back:
            raise ApplicationError(_OTHER_TRANSACTION)

    def _listen(self, current: Session | Connection) -> None:
        if self._listeners:
            return
        by_event: dict[str, Callable[..., Any]] = (
            {"before_commit": self._session_commits}
            if isinstance(current, Session)
            else {
                "commit": self._connection_commits,
                "release_savepoint": self._savepoint_ends,
                "rollback": self._connection_rolls_back,
            }
        )
        for name, listener in by_event.items():
            sqlalchemy_event.listen(current, name, listener)
            self._listeners.append((current, name, listener))

    def _session_commits(self, session: Session) -> None:
        """Called before a transaction or a savepoint of the session commits."""
        savepoint = session.get_nested_transaction()
        if self._has_events and savepoint in (None, self._savepoint):
            self.check()
            self._write_to(session.connection())

    def _connection_commits(self, connection: Connection) -> None:
        """Called before the transaction of the connection commits, also if savepoints in it are open."""
        if not self._has_events:
            return
        self._check_transaction()
        if self._savepoint is not None:
            self.check()
        self._write_to(connection)

    def _savepoint_ends(self, connection: Connection, *_: object) -> None:
        """Called before a savepoint of the connection is released."""
        if self._has_events and connection.get_nested_transaction() is self._savepoint:
            self.check()
            self._write_to(connection)

    def _connection_rolls_back(self, connection: Connection) -> None:
        """Called before the transaction of the connection is rolled back: it may have begun after the first event."""
        self._was_rolled_back = self._was_rolled_back or self._has_events

    def _write_to(self, connection: Connection) -> None:
        self._write(connection)
        # Later events belong to the next transaction.
        self._has_events, self._published_in = False, None
