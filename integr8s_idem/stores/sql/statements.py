"""SQL statements of the store: one statement for each operation on a batch, atomic for each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Executable,
    Select,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    not_,
    null,
    or_,
    select,
    text,
    true,
    tuple_,
    update,
)
from sqlalchemy.types import TypeEngine

from integr8s_idem.records import Reserved
from integr8s_idem.stores.sql import array_parameters
from integr8s_idem.stores.sql.dialects import Changes, Dialect
from integr8s_idem.stores.sql.schema import PROCESSING, records

_row = records.c


def reserve_rows(dialect: Dialect) -> Any:
    """Build an upsert that reserves available rows and returns all rows, including unavailable ones.

    Execute it with one set of parameters per row, or with arrays of parameters; sort rows by key.  It writes every
    existing row, with the old values if nothing changes: only then does the statement return the row that decided the
    verdict, even with concurrent requests.
    """
    if not dialect.supports_arrays:
        return _returning_rows(dialect, dialect.upsert(_insert_of_one_row(dialect), _row.key, _changes))
    parameters = array_parameters.parameter_table(_RESERVATION_TYPES)
    values = {
        name: value if isinstance(value, ColumnElement) else literal(value, _row[name].type)
        for name, value in _reservation(parameters.c.__getitem__, dialect.now).items()
    }
    rows = select(*values.values()).order_by(parameters.c.key.collate("C"))
    insert = dialect.insert(records).from_select(list(values), rows)
    return _returning_rows(dialect, dialect.upsert(insert, _row.key, _changes))


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


def _reservation(parameter: Callable[[str], ColumnElement[Any]], now: ColumnElement[int]) -> dict[str, Any]:
    """Return the row for a new key."""
    return {
        "key": parameter("key"),
        "status": PROCESSING,
        "attempt": 1,
        "fence": now,
        "token": parameter("token"),
        "lease_until": now + parameter("lease"),
        "expires_at": now + parameter("retention"),
        "previous": 0,
        "fingerprint": parameter("fingerprint"),
        "owner": parameter("owner"),
        "trace": parameter("trace"),
        "result_dropped": False,
        "error": "",
        "lapsed": 0,
        "lapsed_alone": 0,
        "alone": parameter("alone"),
        "history_fence": now,
    }


def select_reserved(dialect: Dialect, keys: Sequence[str]) -> Select[Any]:
    """Select the rows after `reserve_rows` without RETURNING, in its transaction, which still locks them."""
    return _latest(dialect, select(*_row, dialect.now.label("read_at")).where(_row.key.in_(keys)))


def _latest(dialect: Dialect, query: Select[Any]) -> Select[Any]:
    """Make `query` read the latest version of rows; at REPEATABLE READ a plain SELECT reads an older snapshot."""
    return query.with_hint(records, dialect.primary_key_hint).with_for_update() if dialect.primary_key_hint else query


def _changes(new: Any) -> Changes:
    """Return the changes to an existing row: reserved anew, taken over, returned to its owner, or unchanged.

    The current time is the fence of the new row.

    MySQL assigns these columns one after the other, and each assignment sees the values written by earlier ones.  So
    the history comes before the fence that it is compared with.  The five columns that the conditions depend on come
    last, in an order that never changes whether the row is taken: once `status`, `fingerprint` and `token` are
    assigned, a taken row is `own` with any lease, and `expires_at`, which makes a row `expired`, is assigned last.
    """
    now = new.fence
    expired = _row.expires_at <= now
    same_payload = or_(_row.fingerprint.is_(None), new.fingerprint.is_(None), _row.fingerprint == new.fingerprint)
    open_ = and_(_row.status == PROCESSING, same_payload)
    released = _row.lease_until.is_(None)
    # A reservation with the same token: the response to an earlier call was lost.
    own = and_(open_, _row.lease_until.is_not(None), _row.token == new.token)
    free = and_(open_, or_(released, _row.lease_until <= now))

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
        "trace": owner_value("trace"),
        **{name: where((expired, null()), column=_row[name]) for name in ("settled_at", "result", "content_type")},
        "result_dropped": where((expired, False), column=_row.result_dropped),
        "error": where((expired, ""), column=_row.error),
        "status": where((expired, PROCESSING), column=_row.status),
        "fingerprint": owner_value("fingerprint"),
        **{name: where((taken, new[name]), column=_row[name]) for name in ("token", "lease_until", "expires_at")},
    }


def renew_leases(dialect: Dialect, reservations: Sequence[Reserved], lease: int) -> list[Executable]:
    """Extend leases to `lease` microseconds from now."""
    until = dialect.now + literal(lease, BigInteger)
    # The record must outlive its lease, so that its attempt is counted.
    expires_at = case((_row.expires_at < until, dialect.now + literal(2 * lease, BigInteger)), else_=_row.expires_at)
    changes = {"lease_until": until, "expires_at": expires_at}
    return _held(dialect, reservations, _row.lease_until.is_not(None), changes)


def release_leases(dialect: Dialect, reservations: Sequence[Reserved]) -> list[Executable]:
    """End leases now."""
    return _held(dialect, reservations, true(), {"lease_until": null()})


def _held(
    dialect: Dialect, reservations: Sequence[Reserved], also: ColumnElement[bool], changes: dict[str, Any]
) -> list[Executable]:
    """Change the rows that `reservations` still own; the last statement returns their keys and fences."""
    tokens = [(one.key, one.fence, one.token) for one in reservations]
    owned = and_(
        matches_any(dialect, tokens, _row.key, _row.fence, _row.token),
        _row.status == PROCESSING,
        _row.expires_at > dialect.now,
        also,
    )
    change = update(records).where(_in_order(dialect, owned)).values(changes)
    if dialect.supports_returning:
        return [change.returning(_row.key, _row.fence)]
    change = change.with_hint(dialect.primary_key_hint)
    # The change does not alter ownership, and its rows are still locked.
    return [change, _latest(dialect, select(_row.key, _row.fence).where(owned))]


def _in_order(dialect: Dialect, rows: ColumnElement[bool]) -> ColumnElement[bool]:
    """Lock `rows` in key order.

    Otherwise PostgreSQL locks them in the order of its scan, and batches with common rows deadlock.
    """
    if not dialect.supports_arrays:
        return rows
    return array_parameters.in_query_result(_row.key, select(_row.key).where(rows).order_by(_row.key).with_for_update())


def has_key(dialect: Dialect, keys: Sequence[str]) -> ColumnElement[bool]:
    """Match the rows of `keys`."""
    return array_parameters.equals_any(_row.key, keys) if dialect.supports_arrays else _row.key.in_(keys)


def matches_any(dialect: Dialect, values: Sequence[tuple[Any, ...]], *columns: Column[Any]) -> ColumnElement[bool]:
    """Match rows whose columns equal one of `values`; the first column is the key."""
    if dialect.supports_arrays:
        table = array_parameters.value_table({column.name: column.type for column in columns}, values)
        return tuple_(*columns).in_(select(*table.c))
    equal = tuple_(*columns).in_(values)
    return equal if dialect.indexes_tuples else and_(_row.key.in_([key for key, *_ in values]), equal)


OUTCOME_TYPES: Final[dict[str, TypeEngine[Any]]] = {
    "of_key": _row.key.type,
    "of_fence": BigInteger(),
    "of_token": _row.token.type,
    "ttl": BigInteger(),
    "of_result": _row.result.type,
    "of_content_type": _row.content_type.type,
    "of_result_dropped": Boolean(),
    "of_error": _row.error.type,
}


def settle_rows(dialect: Dialect, status: int) -> Update:
    """Write outcomes of reservations that are still held.

    Execute it with one set of parameters per row, or with arrays of parameters.
    """
    if not dialect.supports_arrays:
        return settle_one_row(dialect, status)
    new, lookup = (dict(array_parameters.parameter_table(OUTCOME_TYPES).c) for _ in range(2))
    locked = _in_order(dialect, _owned_row(dialect, lookup))
    return update(records).where(locked, _row.key == new["of_key"]).values(_outcome(dialect, status, new))


def settle_one_row(dialect: Dialect, status: int) -> Update:
    """Write one outcome.  Execute it with one set of parameters."""
    new = {name: bindparam(name, type_=type_) for name, type_ in OUTCOME_TYPES.items()}
    return update(records).where(_owned_row(dialect, new)).values(_outcome(dialect, status, new))


def _owned_row(dialect: Dialect, new: Mapping[str, ColumnElement[Any]]) -> ColumnElement[bool]:
    return and_(
        _row.key == new["of_key"],
        _row.fence == new["of_fence"],
        _row.token == new["of_token"],
        _row.status == PROCESSING,
        _row.expires_at > dialect.now,
    )


def _outcome(dialect: Dialect, status: int, new: Mapping[str, ColumnElement[Any]]) -> dict[str, Any]:
    return {
        "status": status,
        "settled_at": dialect.now,
        "expires_at": dialect.now + new["ttl"],
        "lease_until": null(),
        "owner": "",
        "result": new["of_result"],
        "content_type": new["of_content_type"],
        "result_dropped": new["of_result_dropped"],
        "error": new["of_error"],
    }


def select_settled(dialect: Dialect, status: int, reservations: Sequence[Reserved]) -> Select[Any]:
    """Select the `reservations` that have this outcome, from this call or an earlier one, by their fence."""
    fences = [(one.key, one.fence) for one in reservations]
    found = select(_row.key, _row.fence).where(
        matches_any(dialect, fences, _row.key, _row.fence), _row.status == status, _row.expires_at > dialect.now
    )
    return _latest(dialect, found)


def select_records(dialect: Dialect, keys: Sequence[str]) -> Select[Any]:
    return select(records, seen_at(dialect)).where(has_key(dialect, keys), _row.expires_at > dialect.now)


def seen_at(dialect: Dialect) -> ColumnElement[int]:
    """Select the time at which the rows were read."""
    return dialect.now.label("read_at")


def delete_records(dialect: Dialect, keys: Sequence[str]) -> Executable:
    """Delete rows that have not expired; expired rows count as absent, and are left to the purge."""
    unexpired = _row.expires_at > dialect.now
    if dialect.primary_key_hint:
        return _delete_by_key(dialect, keys, unexpired)
    return delete(records).where(_in_order(dialect, and_(has_key(dialect, keys), unexpired)))


def _delete_by_key(dialect: Dialect, keys: Sequence[str], also: ColumnElement[bool]) -> Executable:
    # SQLAlchemy does not support hints in DELETE, and MySQL only in a DELETE with several tables.
    named = bindparam("keys", keys, expanding=True, type_=_row.key.type)
    name = records.name
    return text(f"DELETE {name} FROM {name} {dialect.primary_key_hint} WHERE `key` IN :keys AND {also}").bindparams(
        named
    )


def prefixed(prefix: str) -> ColumnElement[bool]:
    """Match keys that start with `prefix`, using the index; LIKE ignores case in some databases.

    Keys are printable ASCII and compared bytewise, so all keys with this prefix are in this range.
    """
    return and_(_row.key >= prefix, _row.key < prefix + "\x7f")


def select_page(dialect: Dialect, prefix: str, after: str, limit: int) -> Select[Any]:
    """Select the next rows in key order."""
    return (
        select(records, seen_at(dialect))
        .where(prefixed(prefix), _row.key > after, _row.expires_at > dialect.now)
        .order_by(_row.key)
        .limit(limit)
    )


def count_active(dialect: Dialect, prefix: str) -> Select[Any]:
    """Count rows that currently hold a lease."""
    return select(func.count()).where(
        prefixed(prefix),
        _row.status == PROCESSING,
        _row.lease_until > dialect.now,
        _row.expires_at > dialect.now,
    )


def delete_expired(dialect: Dialect, keys: Select[Any] | Sequence[str]) -> Executable:
    """Delete expired rows; `keys` is the query `select_expired` or its result."""
    is_expired = _row.expires_at <= dialect.now
    if not isinstance(keys, Select):
        return _delete_by_key(dialect, keys, is_expired)
    # Run the query separately and first: as a join, PostgreSQL would scan the whole table for a few rows.
    return delete(records).where(
        array_parameters.in_query_result(_row.key, keys) if dialect.supports_arrays else _row.key.in_(keys), is_expired
    )


def select_expired(dialect: Dialect, limit: int) -> Select[Any]:
    """Select keys of expired rows, oldest first.

    Locked rows are skipped, so that a purge never waits for other transactions.
    """
    found = select(_row.key).where(_row.expires_at <= dialect.now).order_by(_row.expires_at).limit(limit)
    hinted = found.with_hint(records, dialect.expiry_index_hint) if dialect.expiry_index_hint else found
    return hinted.with_for_update(skip_locked=True)
