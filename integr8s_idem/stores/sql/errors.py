"""Translate errors of drivers and databases into errors of this library."""

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

from integr8s_idem._util.deadlines import CallDeadline
from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.config.urls import redacted
from integr8s_idem.diagnostics import Code
from integr8s_idem.errors import StoreConfigurationError, StoreError, StoreUnavailableError, TransactionAbortedError

MIGRATE: Final = "run: integr8s-idem store migrate"

_PERMANENT: Final = {
    "28": "the database does not accept this user and password",
    "3D": "the database does not exist; create it, or set another one in store.url",
    "42501": "this database user lacks a permission",
    "42P01": f"the tables of the store do not exist; {MIGRATE}",
    "42703": f"the tables of the store have another version; {MIGRATE}",
    "3F": f"the tables of the store do not exist; {MIGRATE}",
}
"""PostgreSQL's SQLSTATE, or its class, for permanent errors."""

_TEMPORARY: Final = {
    "25006": "the database is read-only: it is a standby, or configured as read-only",
    "25P03": "the database ended a transaction that was idle for too long",
    "40001": "the database could not serialize this transaction",
    "40P01": "the database found a deadlock with another transaction",
    "53": "the database has run out of disk, memory or connections",
    "55P03": "another transaction locks a record for longer than the lock timeout",
    "57": "the database is starting or shutting down, or canceled the statement",
    "58": "the database cannot read or write its files",
}
"""PostgreSQL's SQLSTATE, or its class, for temporary errors."""

_CODES: Final = {
    "28": Code.STORE_CREDENTIALS,
    "42501": Code.STORE_PERMISSION,
    "42P01": Code.SCHEMA_MISSING,
    "42703": Code.SCHEMA_OLDER,
    "3F": Code.SCHEMA_MISSING,
    "25006": Code.STORE_REPLICA,
}
"""Errors, permanent or temporary, that have their own code in `doctor`."""

_PERMISSION: Final = re.compile(r"permission denied for [\w ]+|[A-Z][A-Z ,]* command denied")
"""The missing permission in an error: PostgreSQL names the table, MySQL the statement."""

_LOCK_TIMEOUT: Final = "55P03"
_ABORTED: Final = {"40001", "40P01"}

_SQLITE_PERMANENT: Final = {
    "no such table": f"the tables of the store do not exist; {MIGRATE}",
    "no such column": f"the tables of the store have another version; {MIGRATE}",
    "has no column": f"the tables of the store have another version; {MIGRATE}",
    "file is not a database": "the file is not a SQLite database",
    "malformed": "the SQLite file is corrupt: restore it from a backup, or move it away",
    "unable to open database file": "the SQLite file cannot be opened or created: check its directory",
}
_SQLITE_CODES: Final = {
    "no such table": Code.SCHEMA_MISSING,
    "no such column": Code.SCHEMA_OLDER,
    "has no column": Code.SCHEMA_OLDER,
}
_SQLITE_TEMPORARY: Final = {
    "locked": (
        "another process locks the SQLite file for longer than the lock timeout; "
        "wait until it ends, or increase store.lock_timeout_seconds"
    ),
    "readonly": "the SQLite file is read-only; give this user write permission",
    "disk is full": "the disk of the SQLite file is full; free some space",
    "disk I/O error": "the disk of the SQLite file reports I/O errors; check the disk and the system log",
}

_SQLITE_PRIMARY_CODE: Final = 0xFF
"""Mask for the primary result code of SQLite; the higher bytes of an extended code hold details."""

_MYSQL_PERMANENT: Final = {
    1044: "this database user has no access to the database",
    1045: "the database does not accept this user and password",
    1049: "the database does not exist; create it, or set another one in store.url",
    1054: f"the tables of the store have another version; {MIGRATE}",
    1130: "the database does not allow connections from this machine",
    1142: "this database user lacks a permission",
    1143: "this database user lacks a permission",
    1146: f"the tables of the store do not exist; {MIGRATE}",
    1153: "max_allowed_packet of the server is too small for a batch of results; set it to at least 16M",
    1227: "this database user lacks a permission",
    1665: "binlog_format is STATEMENT, which does not allow writes at READ COMMITTED; set it to ROW or MIXED",
    1698: "the database does not accept this user and password",
    1820: "the password of this database user has expired",
    1862: "the password of this database user has expired",
    3118: "this database user is locked",
    4151: "this database user is locked",
}
"""Error numbers of MySQL and MariaDB for permanent errors."""

_MYSQL_TEMPORARY: Final = {
    1020: "a record has changed since the snapshot of the transaction",
    1021: "the disk of the database is full",
    1040: "the database has no connections left",
    1053: "the database is shutting down",
    1114: "the disk of the database is full",
    1129: "the database blocks this host after too many connection errors; run FLUSH HOSTS there",
    1203: "this database user has no connections left",
    1205: "another transaction locks a record for longer than the lock timeout",
    1213: "the database found a deadlock with another transaction",
    1226: "this database user has reached a resource limit",
    1290: "the database is read-only: it is a replica, or configured as read-only",
    1317: "the database canceled the statement",
    1684: "the tables of the store are being changed, probably by a migration",
    1792: "the database is read-only: it is a replica, or configured as read-only",
    1836: "the database is read-only: it is a replica, or configured as read-only",
    1927: "the database closed the connection",
    1969: "the statement exceeded the execution time limit of the database",
    3024: "the statement exceeded the execution time limit of the database",
    3169: "the database closed the connection",
    4031: "the database closed an idle connection",
}
"""Error numbers of MySQL and MariaDB for temporary errors."""

_MYSQL_CODES: Final = {
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
"""Errors, permanent or temporary, that have their own code in `doctor`."""

_MYSQL_LOCK_TIMEOUT: Final = 1205
_MYSQL_CONCURRENT_DDL: Final = 1684
_MYSQL_ABORTED: Final = frozenset({1020, 1213})
_MYSQL_MISSING: Final = 1305
"""A savepoint or procedure does not exist."""
_DISCONNECTED: Final = frozenset({*range(1158, 1162), *range(2000, 3000)})
"""Failed or lost connections; numbers from 2000 come from the driver."""


class RecordHeldError(StoreUnavailableError):
    """Another transaction locks a record of the batch for longer than the lock timeout."""

    _is_internal = True


class ConcurrentMigrationError(StoreUnavailableError):
    """Another process changes a table at this moment, so that its columns and indexes cannot be read."""

    _is_internal = True


def abort_reason(error: BaseException) -> str:
    """Return why the database aborted a transaction that can be retried; empty for other errors."""
    if not isinstance(error, DBAPIError):
        return ""
    if number := _number(error.orig):
        if is_savepoint_missing(error) and (error.statement or "").startswith("ROLLBACK TO"):
            return "the database has rolled back the whole transaction, not only to the savepoint"
        return _MYSQL_TEMPORARY[number] if number in _MYSQL_ABORTED else ""
    if getattr(error.orig, "sqlite_errorcode", 0) & _SQLITE_PRIMARY_CODE == sqlite3.SQLITE_BUSY:
        return _SQLITE_TEMPORARY["locked"]
    state = str(getattr(error.orig, "sqlstate", None) or "")
    return _TEMPORARY[state] if state in _ABORTED else ""


def is_savepoint_missing(error: DBAPIError) -> bool:
    """Whether a savepoint no longer exists, which in MySQL is the first sign that its transaction has ended."""
    return _number(error.orig) == _MYSQL_MISSING and "SAVEPOINT" in str(error.orig)


def _number(cause: BaseException | None) -> int:
    """Return the MySQL error number; 0 for other databases or if there is none."""
    return cause.args[0] if cause is not None and cause.args and isinstance(cause.args[0], int) else 0


@asynccontextmanager
async def guarded_in_transaction(operation: str, kind: str) -> AsyncIterator[None]:
    """Translate errors within a transaction of the application, whose own timeouts apply.

    Raises:
        TransactionAbortedError: The database aborted the transaction.
        StoreUnavailableError: A temporary error.
        StoreConfigurationError: A permanent error.
    """
    try:
        yield
    except DBAPIError as error:
        raise translate_in_transaction(operation, error, kind) from error


def translate_in_transaction(operation: str, error: DBAPIError, kind: str) -> StoreError | TransactionAbortedError:
    """Translate an error of the driver within a transaction of the application."""
    if reason := abort_reason(error):
        return TransactionAbortedError(operation, reason)
    return translate(operation, error, kind)


@asynccontextmanager
async def guarded(operation: str, timeout: timedelta, kind: str) -> AsyncIterator[None]:
    """Apply `timeout` to the block and translate its errors.

    Raises:
        StoreUnavailableError: A timeout, a failed connection, or another temporary error.
        StoreConfigurationError: A permanent error.
    """
    loop, seconds = asyncio.get_running_loop(), timeout.total_seconds()
    start = loop.time()
    try:
        with pace_of(loop).call_of_a_store(), CallDeadline(start + seconds) as limit:
            yield
    except TimeoutError as error:
        # A connect timeout of the driver may expire before `timeout`.
        waited = seconds if limit.expired else round(loop.time() - start, 1)
        raise StoreUnavailableError(operation, f"no answer from {kind} within {waited:g} s") from error
    except PoolTimeoutError as error:
        raise StoreUnavailableError(operation, f"all connections to {kind} are in use") from error
    except DBAPIError as error:
        raise translate(operation, error, kind) from error
    except SQLAlchemyError as error:
        raise StoreConfigurationError(operation, _message(error)) from error
    except OSError as error:
        raise StoreUnavailableError(operation, f"no connection to {kind}: {_message(error)}") from error


def translate(operation: str, error: DBAPIError, kind: str) -> StoreError:
    """Translate an error of the driver."""
    cause: BaseException = error.orig or error
    text = _message(cause)
    if kind == "sqlite":
        return _translate_sqlite(operation, text)
    if kind in {"mysql", "mariadb"}:
        return _translate_mysql(operation, error, cause)
    state = str(getattr(cause, "sqlstate", None) or "")
    if state == _LOCK_TIMEOUT:
        return RecordHeldError(operation, _TEMPORARY[_LOCK_TIMEOUT])
    for known, kind_of_error in ((_PERMANENT, StoreConfigurationError), (_TEMPORARY, StoreUnavailableError)):
        reason = known.get(state) or known.get(state[:2])
        if state and reason:
            return _create(kind_of_error, operation, reason, text, _CODES.get(state) or _CODES.get(state[:2]))
    if error.connection_invalidated or not state or state.startswith("08"):
        return StoreUnavailableError(operation, f"no connection to {kind}: {text}")
    return StoreConfigurationError(operation, f"{kind} reported: {text}")


def _translate_sqlite(operation: str, text: str) -> StoreError:
    for part, reason in _SQLITE_PERMANENT.items():
        if part in text:
            code = _SQLITE_CODES.get(part)
            return (
                StoreConfigurationError(operation, reason, code) if code else StoreConfigurationError(operation, reason)
            )
    for part, reason in _SQLITE_TEMPORARY.items():
        if part in text:
            return StoreUnavailableError(operation, reason)
    return StoreConfigurationError(operation, f"SQLite reported: {text}")


def _translate_mysql(operation: str, error: DBAPIError, cause: BaseException) -> StoreError:
    number = _number(cause)
    if number == _MYSQL_LOCK_TIMEOUT:
        return RecordHeldError(operation, _MYSQL_TEMPORARY[number])
    if number == _MYSQL_CONCURRENT_DDL:
        return ConcurrentMigrationError(operation, _MYSQL_TEMPORARY[number])
    if number in _MYSQL_TEMPORARY:
        return _create(StoreUnavailableError, operation, _MYSQL_TEMPORARY[number], "", _MYSQL_CODES.get(number))
    if number in _MYSQL_PERMANENT:
        return _create(
            StoreConfigurationError, operation, _MYSQL_PERMANENT[number], _message(cause), _MYSQL_CODES.get(number)
        )
    if error.connection_invalidated or number in _DISCONNECTED or not number:
        return StoreUnavailableError(
            operation, f"no connection to mysql: {_message(cause)}{_connection_failure(cause)}"
        )
    return StoreConfigurationError(operation, f"mysql reported: {_message(cause)}")


def _connection_failure(error: BaseException) -> str:
    """Return why a connection failed, such as an invalid certificate: aiomysql omits it from its message."""
    return f": {_message(error.__cause__)}" if isinstance(error.__cause__, OSError) else ""


def _create(
    kind: type[StoreConfigurationError | StoreUnavailableError],
    operation: str,
    reason: str,
    text: str,
    code: Code | None,
) -> StoreError:
    """Create an error; a missing permission is added to its reason."""
    permission = _PERMISSION.search(text) if code is Code.STORE_PERMISSION else None
    reason = f"{reason} ({permission[0]})" if permission else reason
    return kind(operation, reason, code) if code else kind(operation, reason)


def _message(error: BaseException) -> str:
    """Return the message of the database in one line, without the statement and parameters that SQLAlchemy adds."""
    cause = getattr(error, "orig", None) or error
    return redacted(" ".join(str(cause).split()))[:300]
