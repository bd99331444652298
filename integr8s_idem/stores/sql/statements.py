"""SQL statements of the store: one statement for each operation on a batch, atomic for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    literal_column,
    null,
    or_,
    select,
    text,
    true,
    tuple_,
    update,
)
from sqlalchemy.types import TypeEngine

from integr8s_idem.records import NOBODY, Reserved
from integr8s_idem.stores.sql import array_parameters
from integr8s_idem.stores.sql.dialects import Dialect
from integr8s_idem.stores.sql.reserve_statements import NO_TEXT, constant, latest
from integr8s_idem.stores.sql.schema import PROCESSING, records

_row = records.c


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


def schedule_work(dialect: Dialect, reservations: Sequence[Reserved], delay: int, retention: int) -> list[Executable]:
    """Let nobody hold the rows for `delay` microseconds, and keep them for at least `retention` longer."""
    due = dialect.now + literal(delay, BigInteger)
    kept_until = dialect.now + literal(delay + retention, BigInteger)
    nobody: ColumnElement[bytes] = literal_column(dialect.bytes_sql(NOBODY))
    # An earlier call, whose answer was lost, has scheduled the work already.
    is_scheduled = _row.token == nobody
    lives_longer = or_(is_scheduled, _row.expires_at >= kept_until)
    changes = {
        "lease_until": case((is_scheduled, _row.lease_until), else_=due),
        "expires_at": case((lives_longer, _row.expires_at), else_=kept_until),
        "token": nobody,  # last, since MySQL assigns one column after the other
    }
    return _held(dialect, reservations, true(), changes, tokens=(NOBODY,))


def _held(
    dialect: Dialect,
    reservations: Sequence[Reserved],
    also: ColumnElement[bool],
    changes: dict[str, Any],
    tokens: Sequence[bytes] = (),
) -> list[Executable]:
    """Change the rows that `reservations` still own; the last statement returns their keys and fences.

    `tokens`: others that the rows may have, too.
    """
    owners = [(one.key, one.fence, token) for one in reservations for token in (one.token, *tokens)]
    owned = and_(
        matches_any(dialect, owners, _row.key, _row.fence, _row.token),
        _row.status == PROCESSING,
        _row.expires_at > dialect.now,
        also,
    )
    change = update(records).where(_in_order(dialect, owned)).ordered_values(*changes.items())
    if dialect.supports_returning:
        return [change.returning(_row.key, _row.fence)]
    change = change.with_hint(dialect.primary_key_hint)
    # The change does not alter ownership, and its rows are still locked.
    return [change, latest(dialect, select(_row.key, _row.fence).where(owned))]


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
        _row.status == constant(PROCESSING),
        _row.expires_at > dialect.now,
    )


def _outcome(dialect: Dialect, status: int, new: Mapping[str, ColumnElement[Any]]) -> dict[str, Any]:
    return {
        "status": constant(status),
        "settled_at": dialect.now,
        "expires_at": dialect.now + new["ttl"],
        "lease_until": null(),
        "owner": NO_TEXT,
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
    return latest(dialect, found)


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
