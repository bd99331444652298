"""Errors of drivers and databases as ours.  The only place that knows both."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from integr8s_idem._util.deadlines import Deadline
from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.config.urls import redacted
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError, TransactionAbortedError

MIGRATE: Final = "run: integr8s-idem store migrate"

_REFUSED: Final = {
    "28": "the database does not accept this user and password",
    "3D": "there is no such database; make it, or name another one in store.url",
    "42501": "this database user may not do that",
    "42P01": f"the tables of the store are not there; {MIGRATE}",
    "42703": f"the tables of the store are of another version; {MIGRATE}",
    "3F": f"the tables of the store are not there; {MIGRATE}",
}
"""PostgreSQL's SQLSTATE, or its class, for what waiting does not fix."""

_PASSING: Final = {
    "25006": "the database is read-only: a standby, or one that was told to be",
    "40001": "the database could not order this among other transactions",
    "40P01": "the database found a deadlock with another transaction",
    "53": "the database has run out of disk, memory or connections",
    "55P03": "another transaction holds a record longer than we wait",
    "57": "the database shuts down, starts, or was told to stop this",
    "58": "the database cannot read or write its files",
}

_FOUND: Final = {
    "28": Code.STORE_CREDENTIALS,
    "42501": Code.STORE_PERMISSION,
    "42P01": Code.SCHEMA_MISSING,
    "42703": Code.SCHEMA_OLDER,
    "3F": Code.SCHEMA_MISSING,
    "25006": Code.STORE_REPLICA,
}
"""Those of both that have a code of their own for `doctor`."""

_RIGHT: Final = re.compile(r"permission denied for [\w ]+|[A-Z][A-Z ,]* command denied")
"""Where a database names what it does not allow: PostgreSQL the table, MySQL the right."""

_HELD: Final = "55P03"
_GIVEN_UP: Final = {"40001", "40P01"}

_SQLITE_REFUSED: Final = {
    "no such table": f"the tables of the store are not there; {MIGRATE}",
    "no such column": f"the tables of the store are of another version; {MIGRATE}",
    "has no column": f"the tables of the store are of another version; {MIGRATE}",
    "file is not a database": "the file is no SQLite database",
    "malformed": "the SQLite file is damaged: restore it, or put it aside",
    "unable to open database file": "the SQLite file cannot be opened or made: look at its folder",
}
_SQLITE_FOUND: Final = {
    "no such table": Code.SCHEMA_MISSING,
    "no such column": Code.SCHEMA_OLDER,
    "has no column": Code.SCHEMA_OLDER,
}
_SQLITE_PASSING: Final = {
    "locked": (
        "another process writes into the SQLite file longer than we wait; "
        "let it end, or raise store.lock_timeout_seconds"
    ),
    "readonly": "the SQLite file is read-only; let this user write it",
    "disk is full": "the disk of the SQLite file is full; make room on it",
    "disk I/O error": "the disk of the SQLite file fails; look at the disk, and at the log of the system",
}

_SQLITE_CODE: Final = 0xFF
"""An error of SQLite is in the last byte; what is before that says more about it."""

_MYSQL_REFUSED: Final = {
    1044: "this database user may not use that database",
    1045: "the database does not accept this user and password",
    1049: "there is no such database; make it, or name another one in store.url",
    1054: f"the tables of the store are of another version; {MIGRATE}",
    1130: "the database lets nobody in from this machine",
    1142: "this database user may not do that",
    1143: "this database user may not do that",
    1146: f"the tables of the store are not there; {MIGRATE}",
    1153: "max_allowed_packet of the server is too small for a batch of results; set it to 16M at least",
    1227: "this database user may not do that",
    1665: "binlog_format is STATEMENT, which takes no writes at READ COMMITTED; set it to ROW or MIXED",
    1698: "the database does not accept this user and password",
    1820: "the password of this database user has expired",
    1862: "the password of this database user has expired",
    3118: "this database user is locked",
    4151: "this database user is locked",
}
"""Numbers of MySQL and MariaDB for what waiting does not fix."""

_MYSQL_PASSING: Final = {
    1020: "a record has changed since the transaction first looked",
    1021: "the disk of the database is full",
    1040: "the database has no connection left",
    1053: "the database shuts down",
    1114: "the disk of the database is full",
    1129: "the database shuts us out after too many broken connections; run FLUSH HOSTS there",
    1203: "this database user has no connection left",
    1205: "another transaction holds a record longer than we wait",
    1213: "the database found a deadlock with another transaction",
    1226: "this database user has used up what it may",
    1290: "the database is read-only: a replica, or one that was told to be",
    1317: "the database was told to stop this",
    1792: "the database is read-only: a replica, or one that was told to be",
    1836: "the database is read-only: a replica, or one that was told to be",
    1927: "the database ended the connection",
    1969: "the database was told to stop what takes this long",
    3024: "the database was told to stop what takes this long",
    3169: "the database ended the connection",
    4031: "the database ended a connection that nobody used",
}
_MYSQL_FOUND: Final = {
    1044: Code.STORE_PERMISSION,
    1045: Code.STORE_CREDENTIALS,
    1054: Code.SCHEMA_OLDER,
    1130: Code.STORE_CREDENTIALS,
    1142: Code.STORE_PERMISSION,
    1143: Code.STORE_PERMISSION,
    1146: Code.SCHEMA_MISSING,
    1227: Code.STORE_PERMISSION,
    1290: Code.STORE_REPLICA,
    1698: Code.STORE_CREDENTIALS,
    1792: Code.STORE_REPLICA,
    1820: Code.STORE_CREDENTIALS,
    1836: Code.STORE_REPLICA,
    1862: Code.STORE_CREDENTIALS,
    3118: Code.STORE_CREDENTIALS,
    4151: Code.STORE_CREDENTIALS,
}
"""Those of both that have a code of their own for `doctor`."""

_MYSQL_HELD: Final = 1205
_MYSQL_GIVEN_UP: Final = frozenset({1020, 1213})
_MYSQL_MISSING: Final = 1305
"""There is no such savepoint, or procedure."""
_BROKEN: Final = frozenset({*range(1158, 1162), *range(2000, 3000)})
"""Connections that broke, or cannot be had: those above 2000 are the driver's."""


class RecordHeldError(StoreUnavailableError):
    """Another transaction holds a record of the batch longer than we wait."""


def gave_up(error: BaseException) -> str:
    """What the database says if it has given up a transaction that can be begun anew; otherwise nothing."""
    if not isinstance(error, DBAPIError):
        return ""
    if number := _number(error.orig):
        if savepoint_gone(error) and (error.statement or "").startswith("ROLLBACK TO"):
            return "the database has rolled all of it back, not only what was behind the savepoint"
        return _MYSQL_PASSING[number] if number in _MYSQL_GIVEN_UP else ""
    if getattr(error.orig, "sqlite_errorcode", 0) & _SQLITE_CODE == sqlite3.SQLITE_BUSY:
        return _SQLITE_PASSING["locked"]
    state = str(getattr(error.orig, "sqlstate", None) or "")
    return _PASSING[state] if state in _GIVEN_UP else ""


def savepoint_gone(error: DBAPIError) -> bool:
    """Whether a savepoint is not there any more: in MySQL the first sign that its transaction has ended."""
    return _number(error.orig) == _MYSQL_MISSING and "SAVEPOINT" in str(error.orig)


def _number(cause: BaseException | None) -> int:
    """MySQL's number of the error; 0 for other databases, and for none."""
    return cause.args[0] if cause is not None and cause.args and isinstance(cause.args[0], int) else 0


@asynccontextmanager
async def joining(operation: str, kind: str) -> AsyncIterator[None]:
    """Translate what goes wrong in a transaction of the application's, whose own limits of time hold.

    Raises:
        TransactionAbortedError: The database gave the transaction up.
        StoreUnavailableError, StoreConfigurationError: As `guarded`.
    """
    try:
        yield
    except DBAPIError as error:
        raise of_joined(operation, error, kind) from error


def of_joined(operation: str, error: DBAPIError, kind: str) -> StoreError | TransactionAbortedError:
    """Our error for one of the driver's in a transaction of the application's."""
    if said := gave_up(error):
        return TransactionAbortedError(operation, said)
    return translated(operation, error, kind)


@asynccontextmanager
async def guarded(operation: str, timeout: timedelta, kind: str) -> AsyncIterator[None]:
    """Give what happens inside `timeout`, and translate what goes wrong.

    Raises:
        StoreUnavailableError: No answer in time, no connection, or a refusal that passes.
        StoreConfigurationError: A refusal that does not pass by waiting.
    """
    loop, seconds = asyncio.get_running_loop(), timeout.total_seconds()
    begun = loop.time()
    try:
        with pace_of(loop).call_of_a_store(), Deadline(begun + seconds) as limit:
            yield
    except TimeoutError as error:
        # Drivers have limits of their own, to connect in, which may end before ours.
        waited = seconds if limit.expired else round(loop.time() - begun, 1)
        raise StoreUnavailableError(operation, f"no answer from {kind} within {waited:g} s") from error
    except PoolTimeoutError as error:
        raise StoreUnavailableError(operation, f"all connections to {kind} are in use") from error
    except DBAPIError as error:
        raise translated(operation, error, kind) from error
    except SQLAlchemyError as error:
        raise StoreConfigurationError(operation, _told(error)) from error
    except OSError as error:
        raise StoreUnavailableError(operation, f"no connection to {kind}: {_told(error)}") from error


def translated(operation: str, error: DBAPIError, kind: str) -> StoreError:
    """Our error for one of the driver's."""
    cause: BaseException = error.orig or error
    text = _told(cause)
    if kind == "sqlite":
        return _of_sqlite(operation, text)
    if kind in {"mysql", "mariadb"}:
        return _of_mysql(operation, error, cause)
    state = str(getattr(cause, "sqlstate", None) or "")
    if state == _HELD:
        return RecordHeldError(operation, _PASSING[_HELD])
    for known, kind_of_error in ((_REFUSED, StoreConfigurationError), (_PASSING, StoreUnavailableError)):
        said = known.get(state) or known.get(state[:2])
        if state and said:
            return _refusal(kind_of_error, operation, said, text, _FOUND.get(state) or _FOUND.get(state[:2]))
    if error.connection_invalidated or not state or state.startswith("08"):
        return StoreUnavailableError(operation, f"no connection to {kind}: {text}")
    return StoreConfigurationError(operation, f"{kind} answers: {text}")


def _of_sqlite(operation: str, text: str) -> StoreError:
    for part, said in _SQLITE_REFUSED.items():
        if part in text:
            code = _SQLITE_FOUND.get(part)
            return StoreConfigurationError(operation, said, code) if code else StoreConfigurationError(operation, said)
    for part, said in _SQLITE_PASSING.items():
        if part in text:
            return StoreUnavailableError(operation, said)
    return StoreConfigurationError(operation, f"SQLite answers: {text}")


def _of_mysql(operation: str, error: DBAPIError, cause: BaseException) -> StoreError:
    number = _number(cause)
    if number == _MYSQL_HELD:
        return RecordHeldError(operation, _MYSQL_PASSING[number])
    if number in _MYSQL_PASSING:
        return _refusal(StoreUnavailableError, operation, _MYSQL_PASSING[number], "", _MYSQL_FOUND.get(number))
    if number in _MYSQL_REFUSED:
        told = _told(cause)
        return _refusal(StoreConfigurationError, operation, _MYSQL_REFUSED[number], told, _MYSQL_FOUND.get(number))
    if error.connection_invalidated or number in _BROKEN or not number:
        return StoreUnavailableError(operation, f"no connection to mysql: {_told(cause)}{_why(cause)}")
    return StoreConfigurationError(operation, f"mysql answers: {_told(cause)}")


def _why(error: BaseException) -> str:
    """What kept the driver from a connection, which it does not say itself: a certificate, a name, a closed port."""
    return f": {_told(error.__cause__)}" if isinstance(error.__cause__, OSError) else ""


def _refusal(
    kind: type[StoreConfigurationError | StoreUnavailableError], operation: str, said: str, text: str, code: Code | None
) -> StoreError:
    """`said`; of a right that lacks also what the database calls it."""
    named = _RIGHT.search(text) if code is Code.STORE_PERMISSION else None
    reason = f"{said} ({named[0]})" if named else said
    return kind(operation, reason, code) if code else kind(operation, reason)


def _told(error: BaseException) -> str:
    """What the database says, in one line; SQLAlchemy adds statement and parameters, which hold payloads."""
    cause = getattr(error, "orig", None) or error
    return redacted(" ".join(str(cause).split()))[:300]
