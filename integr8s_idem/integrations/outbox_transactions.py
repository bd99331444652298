"""The transaction in which a block of the outbox publishes its events.

Events share the outcome of the transaction in which they are published.  A block writes them at its end, or, if the
transaction commits before that, immediately before the commit.

SQLAlchemy considers a transaction of a connection ended when a listener of its commit raises an error, and sends no
ROLLBACK: neither later, nor when the connection returns to its pool.  So a listener that refuses a commit rolls back
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.engine import Connection, NestedTransaction
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from integr8s_idem.errors import ApplicationError

Held: TypeAlias = AsyncSession | AsyncConnection | Session | Connection

_OTHER_SAVEPOINT: Final = (
    "this block of the outbox began outside the current savepoint, so its events would be published even if the "
    "savepoint is rolled back: begin a block within the savepoint"
)
_OTHER_TRANSACTION: Final = (
    "the transaction in which events were published was rolled back within the block of the outbox, so they would not "
    "share its outcome, and none is written: end the block before the transaction, and repeat it in a new block"
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
        self._written_in: object = None
        """The transaction in which events were written that it has not committed, as far as is known."""
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
        self.check_outcome()
        current = self._current()
        if current is not None and current.get_nested_transaction() is not self._savepoint:
            raise ApplicationError(_OTHER_SAVEPOINT)

    def check_outcome(self) -> None:
        """Check that no transaction in which events were published or written has been rolled back.

        Raises:
            ApplicationError: One has.
        """
        current = self._current()
        transaction = current and current.get_transaction()
        others = {self._published_in, self._written_in} - {None, transaction}
        if others or self._was_rolled_back:
            raise ApplicationError(_OTHER_TRANSACTION)

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

    def _listen(self, current: Session | Connection) -> None:
        if self._listeners:
            return
        by_event: dict[str, Callable[..., Any]] = (
            {
                "before_commit": self._session_commits,
                "after_commit": self._session_has_committed,
                "after_soft_rollback": self._session_has_rolled_back,
            }
            if isinstance(current, Session)
            else {
                "commit": self._connection_commits,
                "rollback": self._connection_rolls_back,
                "release_savepoint": self._savepoint_ends,
                "rollback_savepoint": self._savepoint_rolls_back,
            }
        )
        for name, listener in by_event.items():
            sqlalchemy_event.listen(current, name, listener)
            self._listeners.append((current, name, listener))

    def _session_commits(self, session: Session) -> None:
        """Called before a transaction or a savepoint of the session commits."""
        if session.get_nested_transaction() not in (None, self._savepoint):
            return
        self.check_outcome()
        if self._has_events:
            self.check()
            self._write_to(session.connection(), session.get_transaction())

    def _session_has_committed(self, session: Session) -> None:
        """Called after a transaction or a savepoint of the session has committed."""
        if session.get_nested_transaction() is None:  # after a savepoint, the transaction may still be rolled back
            self._written_in = None

    def _session_has_rolled_back(self, session: Session, ended: SessionTransaction) -> None:
        """Called after a transaction or a savepoint of the session was rolled back."""
        # Savepoints that began later contain no events of this block.
        around = self._savepoint if isinstance(self._savepoint, SessionTransaction) else None
        while around is not None and around is not ended:
            around = around.parent
        if self._may_be_lost() and around is ended:
            self._was_rolled_back = True

    def _connection_commits(self, connection: Connection) -> None:
        """Called before the transaction of the connection commits, also if savepoints in it are open."""
        with _rolled_back_on_errors(connection):
            self.check_outcome()
            if self._has_events:
                if self._savepoint is not None:
                    self.check()
                self._write_to(connection, None)
        # No event says whether the database commits.
        self._written_in = None

    def _connection_rolls_back(self, connection: Connection) -> None:
        """Called before the transaction of the connection is rolled back: it may have begun after the first event."""
        if self._may_be_lost():
            self._was_rolled_back = True

    def _savepoint_ends(self, connection: Connection, name: str, context: object) -> None:
        """Called before a savepoint of the connection is released."""
        if self._was_rolled_back:
            return  # with one around it, this savepoint does not exist anymore, and its release fails
        if self._has_events and connection.get_nested_transaction() is self._savepoint:
            with _rolled_back_on_errors(connection, name):
                self.check()
                self._write_to(connection, connection.get_transaction())

    def _savepoint_rolls_back(self, connection: Connection, name: str, context: object) -> None:
        """Called before a rollback to a savepoint of the connection."""
        # A savepoint around the current one can be rolled back first.  SQLAlchemy then still reports the current one.
        if self._may_be_lost() and name in _names_around(self._savepoint):
            self._was_rolled_back = True

    def _may_be_lost(self) -> bool:
        """Whether a rollback would undo what belongs to the events of this block."""
        return self._has_events or self._written_in is not None

    def _write_to(self, connection: Connection, transaction: object) -> None:
        self._write(connection)
        # Later events belong to the next transaction.
        self._has_events, self._published_in, self._written_in = False, None, transaction


def _names_around(savepoint: object) -> Iterator[str]:
    """Yield the names of a savepoint of a connection and of the savepoints around it."""
    while isinstance(savepoint, NestedTransaction):
        yield savepoint._savepoint  # noqa: SLF001  # there is no public API
        savepoint = savepoint._previous_nested  # noqa: SLF001


@contextmanager
def _rolled_back_on_errors(connection: Connection, savepoint: str | None = None) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not connection.invalidated:
            _roll_back(connection, savepoint, error)
        raise


def _roll_back(connection: Connection, savepoint: str | None, cause: BaseException) -> None:
    """Roll back because of `cause`, as SQLAlchemy does, with the events that other listeners expect."""
    dispatch: Any = connection.dispatch
    try:
        if savepoint is not None:
            dispatch.rollback_savepoint(connection, savepoint, None)
            connection.dialect.do_rollback_to_savepoint(connection, savepoint)
        else:
            dispatch.rollback(connection)
            connection.dialect.do_rollback(connection.connection)
    except Exception as error:  # noqa: BLE001 - any error of any driver
        # Without its connection, the database rolls back by itself.
        connection.invalidate(error)
        cause.add_note(f"The connection was closed, because the rollback failed: {type(error).__name__}: {error}")
