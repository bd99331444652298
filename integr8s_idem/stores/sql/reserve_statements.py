"""SQL statements that reserve keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Integer,
    Select,
    Text,
    and_,
    bindparam,
    case,
    false,
    func,
    literal_column,
    not_,
    null,
    or_,
    select,
)
from sqlalchemy.types import TypeEngine

from integr8s_idem.records import NOBODY
from integr8s_idem.stores.sql import array_parameters
from integr8s_idem.stores.sql.dialects import Changes, Dialect
from integr8s_idem.stores.sql.schema import PROCESSING, records

_row = records.c

NO_TEXT: Final[ColumnElement[str]] = literal_column("''", Text)
"""An empty text in the text of a statement, as `constant`."""


def constant(number: int) -> ColumnElement[int]:
    """Write a number into the text of a statement: a parameter would be encoded for each execution."""
    return literal_column(str(number), Integer)


def reserve_rows(dialect: Dialect) -> Any:
    """Build an upsert that reserves available rows and returns all rows, including unavailable ones.

    Execute it with one set of parameters per row, or with arrays of parameters; sort rows by key.  It writes every
    existing row, with the old values if nothing changes: only then does the statement return the row that decided the
    verdict, even with concurrent requests.
    """
    if not dialect.supports_arrays:
        return _returning_rows(
            dialect, dialect.upsert(_insert_of_one_row(dialect), _row.key, partial(_changes, dialect))
        )
    parameters = array_parameters.parameter_table(_RESERVATION_TYPES)
    values = _reservation(parameters.c.__getitem__, dialect.now)
    rows = select(*values.values()).order_by(parameters.c.key.collate("C"))
    insert = dialect.insert(records).from_select(list(values), rows)
    return _returning_rows(dialect, dialect.upsert(insert, _row.key, partial(_changes, dialect)))


def reserve_new_row(dialect: Dialect) -> Any:
    """Build an upsert that reserves one new key, or returns the existing row unchanged.

    It also writes existing rows, for the same reason as `reserve_rows`.  In PostgreSQL it takes a fifth of the time of
    `reserve_rows`, whose changes to existing rows are planned and initialized even for new ones.
    """
    upsert = dialect.upsert(_insert_of_one_row(dialect), _row.key, lambda _: {"previous": _row.previous})
    return _returning_rows(dialect, upsert)


def _insert_of_one_row(dialect: Dialect) -> Any:
    parameters = {name: bindparam(name, type_=type_) for name, type_ in _RESERVATION_TYPES.items()}
    return dialect.insert(records).values(_reservation(parameters.__getitem__, dialect.now))


def _returning_rows(dialect: Dialect, statement: Any) -> Any:
    # The caller knows the time if the clock is that of this machine.
    read_at = () if dialect.time_parameters() else (dialect.now.label("read_at"),)
    return statement.returning(*_row, *read_at) if dialect.supports_returning else statement


_RESERVATION_TYPES: Final[dict[str, TypeEngine[Any]]] = {
    "key": _row.key.type,
    "token": _row.token.type,
    "lease": BigInteger(),
    "retention": BigInteger(),
    "fingerprint": _row.fingerprint.type,
    "owner": _row.owner.type,
    "trace": _row.trace.type,
    "alone": Boolean(),
}


def _reservation(
    parameter: Callable[[str], ColumnElement[Any]], now: ColumnElement[int]
) -> dict[str, ColumnElement[Any]]:
    """Return the row for a new key."""
    return {
        "key": parameter("key"),
        "status": constant(PROCESSING),
        "attempt": constant(1),
        "fence": now,
        "token": parameter("token"),
        "lease_until": now + parameter("lease"),
        "expires_at": now + parameter("retention"),
        "previous": constant(0),
        "fingerprint": parameter("fingerprint"),
        "owner": parameter("owner"),
        "trace": parameter("trace"),
        "result_dropped": false(),
        "error": NO_TEXT,
        "lapsed": constant(0),
        "lapsed_alone": constant(0),
        "alone": parameter("alone"),
        "history_fence": now,
    }


def select_reserved(dialect: Dialect, keys: Sequence[str]) -> Select[Any]:
    """Select the rows after `reserve_rows` without RETURNING, in its transaction, which still locks them."""
    return latest(dialect, select(*_row, dialect.now.label("read_at")).where(_row.key.in_(keys)))


def latest(dialect: Dialect, query: Select[Any]) -> Select[Any]:
    """Make `query` read the latest version of rows; at REPEATABLE READ a plain SELECT reads an older snapshot."""
    return query.with_hint(records, dialect.primary_key_hint).with_for_update() if dialect.primary_key_hint else query


def _same_payload(dialect: Dialect, stored: ColumnElement[bytes], offered: ColumnElement[bytes]) -> ColumnElement[bool]:
    """Return the opposite of `integr8s_idem.records.is_other_payload`.

    Its constants are in the text, because the condition is repeated for many columns.
    """
    field_sets = [func.substr(fingerprint, constant(1), constant(4)) for fingerprint in (stored, offered)]
    marked: ColumnElement[bytes] = literal_column(dialect.bytes_sql(b"\x80"))
    return or_(
        stored.is_(None),
        offered.is_(None),
        stored == offered,
        and_(or_(stored >= marked, offered >= marked), field_sets[0] != field_sets[1]),
    )


def _changes(dialect: Dialect, new: Any) -> Changes:
    """Return the changes to an existing row: reserved anew, taken over, returned to its owner, or unchanged.

    The current time is the fence of the new row.

    MySQL assigns these columns one after the other, and each assignment sees the values written by earlier ones.  So
    the history comes before the fence that it is compared with, and the trace of the previous attempt before that of
    the new one.  The five columns that the conditions depend on come last, in an order that never changes whether the
    row is taken: once `status`, `fingerprint` and `token` are assigned, a taken row is `own` with any lease, and
    `expires_at`, which makes a row `expired`, is assigned last.
    """
    now = new.fence
    expired = _row.expires_at <= now
    open_ = and_(_row.status == PROCESSING, _same_payload(dialect, _row.fingerprint, new.fingerprint))
    released = or_(_row.lease_until.is_(None), _row.token == literal_column(dialect.bytes_sql(NOBODY)))
    # A reservation with the same token: the response to an earlier call was lost.
    own = and_(open_, _row.lease_until.is_not(None), _row.token == new.token)
    free = and_(open_, or_(_row.lease_until.is_(None), _row.lease_until <= now))

    def where(*cases: tuple[ColumnElement[bool], Any], column: ColumnElement[Any]) -> ColumnElement[Any]:
        """Use the value of the first matching case, or keep the value of the row."""
        return case(*cases, else_=column)

    def owner_value(name: str) -> ColumnElement[Any]:
        """Use the value of the new owner; keep the value if the owner is the same."""
        return where((expired, new[name]), (own, _row[name]), (free, new[name]), column=_row[name])

    def counted(name: str, more: Any) -> ColumnElement[Any]:
        """Count lapsed attempts: the last attempt has lapsed unless it was released."""
        column = _row[name]
        known = case((described, column), else_=0)
        return where(
            (expired, 0), (own, known), (and_(free, not_(released)), known + more), (free, known), column=column
        )

    # A worker of version 1 assigns a new fence, but leaves the history of an earlier attempt in the row.
    described = _row.history_fence == _row.fence
    next_fence = case((_row.fence >= new.fence, _row.fence + 1), else_=new.fence)

    def fenced(name: str) -> ColumnElement[Any]:
        """Return the fence of the row after the write."""
        return where((expired, next_fence), (own, _row.fence), (free, next_fence), column=_row[name])

    taken = or_(expired, own, free)
    return {
        "lapsed_alone": counted("lapsed_alone", case((and_(described, _row.alone), 1), else_=0)),
        "lapsed": counted("lapsed", 1),
        "alone": where((taken, new["alone"]), column=_row.alone),
        "history_fence": fenced("history_fence"),
        "attempt": where((expired, 1), (own, _row.attempt), (free, _row.attempt + 1), column=_row.attempt),
        "fence": fenced("fence"),
        "previous": where(
            (expired, 0), (own, _row.previous), (and_(free, released), 1), (free, 2), column=_row.previous
        ),
        "owner": owner_value("owner"),
        "previous_trace": where(
            (expired, null()), (own, _row.previous_trace), (free, _row.trace), column=_row.previous_trace
        ),
        "trace": owner_value("trace"),
        **{name: where((expired, null()), column=_row[name]) for name in ("settled_at", "result", "content_type")},
        "result_dropped": where((expired, False), column=_row.result_dropped),
        "error": where((expired, ""), column=_row.error),
        "status": where((expired, PROCESSING), column=_row.status),
        "fingerprint": owner_value("fingerprint"),
        **{name: where((taken, new[name]), column=_row[name]) for name in ("token", "lease_until", "expires_at")},
    }
