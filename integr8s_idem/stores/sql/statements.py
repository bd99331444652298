"""What is asked of the database: each verb is one statement for a whole batch, atomic per row."""

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
    """Reserve what is free; whatever is not comes back as it is.

    Executed with one set of parameters a row, or with their arrays; rows in the order of their keys.  A row that is
    there is always written, with its own values where nothing changes: only so does the one statement answer with
    what decided, however many others ask at that moment.
    """
    if not dialect.supports_arrays:
        return _returning_rows(dialect, dialect.upsert(_insert_of_one_row(dialect), _row.key, _taken_over))
    offered = array_parameters.parameter_table(_RESERVATION_TYPES)
    values = {
        name: value if isinstance(value, ColumnElement) else literal(value, _row[name].type)
        for name, value in _reservation(offered.c.__getitem__, dialect.now).items()
    }
    chosen = select(*values.values()).order_by(offered.c.key.collate("C"))
    insert = dialect.insert(records).from_select(list(values), chosen)
    return _returning_rows(dialect, dialect.upsert(insert, _row.key, _taken_over))


def reserve_new_row(dialect: Dialect) -> Any:
    """Reserve the key of one set of parameters if it is not there; a row that is there comes back as it is.

    It is written even so, as by `reserve_rows`, and for the same reason.  PostgreSQL takes a fifth of the time for this:
    there all that `reserve_rows` does to a row that is there has to be planned and set up, for one that is not as well.
    """
    upsert = dialect.upsert(_insert_of_one_row(dialect), _row.key, lambda _: {"previous": _row.previous})
    return _returning_rows(dialect, upsert)


def _insert_of_one_row(dialect: Dialect) -> Any:
    offered = {name: bindparam(name, type_=type_) for name, type_ in _RESERVATION_TYPES.items()}
    return dialect.insert(records).values(_reservation(offered.__getitem__, dialect.now))


def _returning_rows(dialect: Dialect, statement: Any) -> Any:
    # Where the clock is this machine's, we know what it said.
    asked_at = () if dialect.time_parameters() else (dialect.now.label("asked_at"),)
    return statement.returning(*_row, *asked_at) if dialect.supports_returning else statement


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


def _reservation(offer: Callable[[str], ColumnElement[Any]], now: ColumnElement[int]) -> dict[str, Any]:
    """The row of a key that is not there."""
    return {
        "key": offer("key"),
        "status": PROCESSING,
        "attempt": 1,
        "fence": now,
        "token": offer("token"),
        "lease_until": now + offer("lease"),
        "expires_at": now + offer("retention"),
        "previous": 0,
        "fingerprint": offer("fingerprint"),
        "owner": offer("owner"),
        "trace": offer("trace"),
        "result_dropped": False,
        "error": "",
        "lapsed": 0,
        "lapsed_alone": 0,
        "alone": offer("alone"),
        "history_fence": now,
    }


def select_reserved(dialect: Dialect, keys: Sequence[str]) -> Select[Any]:
    """What `reserve_rows` has left behind, where it cannot say so: asked in its transaction, which holds the rows."""
    return _newest(dialect, select(*_row, dialect.now.label("asked_at")).where(_row.key.in_(keys)))


def _newest(dialect: Dialect, asked: Select[Any]) -> Select[Any]:
    """`asked` of the rows as they are: at REPEATABLE READ a plain SELECT is answered from before others wrote them."""
    return asked.with_hint(records, dialect.primary_key_hint).with_for_update() if dialect.primary_key_hint else asked


def _taken_over(new: Any) -> Changes:
    """What becomes of a row that is there: taken anew, taken over, found again by its owner, or left alone.

    What time it is is_final in the row that is not there: its fence is made of it.

    MySQL writes these one after the other, and each sees what those before it wrote.  So the history is written before
    the fence that it is compared with.  The five columns that decide come last, in an order in which nothing written so
    far changes whether the row is taken: a row that is taken has the status, the payload and then the token that make
    it `ours` whatever its lease, and its expiry, which makes it `gone`, is written when nobody asks any more.
    """
    now = new.fence
    gone = _row.expires_at <= now
    same_payload = or_(_row.fingerprint.is_(None), new.fingerprint.is_(None), _row.fingerprint == new.fingerprint)
    open_ = and_(_row.status == PROCESSING, same_payload)
    released = _row.lease_until.is_(None)
    # Our own reservation: the answer to an earlier call was lost.
    ours = and_(open_, _row.lease_until.is_not(None), _row.token == new.token)
    free = and_(open_, or_(released, _row.lease_until <= now))

    def where(*cases: tuple[ColumnElement[bool], Any], column: ColumnElement[Any]) -> ColumnElement[Any]:
        """The first that holds; in no case the row keeps what it has."""
        return case(*cases, else_=column)

    def mine(name: str) -> ColumnElement[Any]:
        """Of the new owner, who may be the old one."""
        return where((gone, new[name]), (ours, _row[name]), (free, new[name]), column=_row[name])

    def counted(name: str, more: Any) -> ColumnElement[Any]:
        """A number of attempts that lapsed: the last one is the next of them if nobody has released it."""
        column = _row[name]
        known = case((described, column), else_=0)
        return where((gone, 0), (ours, known), (and_(free, not_(released)), known + more), (free, known), column=column)

    # A worker of version 1 gives a row a new fence, and leaves the history of an earlier attempt in it.
    described = _row.history_fence == _row.fence
    next_fence = case((_row.fence >= new.fence, _row.fence + 1), else_=new.fence)

    def fenced(name: str) -> ColumnElement[Any]:
        """The fence of the row once it is written."""
        return where((gone, next_fence), (ours, _row.fence), (free, next_fence), column=_row[name])

    taken = or_(gone, ours, free)
    return {
        "lapsed_alone": counted("lapsed_alone", case((and_(described, _row.alone), 1), else_=0)),
        "lapsed": counted("lapsed", 1),
        "alone": where((taken, new["alone"]), column=_row.alone),
        "history_fence": fenced("history_fence"),
        "attempt": where((gone, 1), (ours, _row.attempt), (free, _row.attempt + 1), column=_row.attempt),
        "fence": fenced("fence"),
        "previous": where((gone, 0), (ours, _row.previous), (and_(free, released), 1), (free, 2), column=_row.previous),
        "owner": mine("owner"),
        "trace": mine("trace"),
        **{name: where((gone, null()), column=_row[name]) for name in ("settled_at", "result", "content_type")},
        "result_dropped": where((gone, False), column=_row.result_dropped),
        "error": where((gone, ""), column=_row.error),
        "status": where((gone, PROCESSING), column=_row.status),
        "fingerprint": mine("fingerprint"),
        **{name: where((taken, new[name]), column=_row[name]) for name in ("token", "lease_until", "expires_at")},
    }


def renew_leases(dialect: Dialect, reservations: Sequence[Reserved], lease: int) -> list[Executable]:
    """Let leases end `lease` microseconds from now."""
    until = dialect.now + literal(lease, BigInteger)
    # The record outlives its lease, so that the attempt still counts.
    keeps = case((_row.expires_at < until, dialect.now + literal(2 * lease, BigInteger)), else_=_row.expires_at)
    changes = {"lease_until": until, "expires_at": keeps}
    return _held(dialect, reservations, _row.lease_until.is_not(None), changes)


def release_leases(dialect: Dialect, reservations: Sequence[Reserved]) -> list[Executable]:
    """Let leases end now."""
    return _held(dialect, reservations, true(), {"lease_until": null()})


def _held(
    dialect: Dialect, reservations: Sequence[Reserved], also: ColumnElement[bool], changes: dict[str, Any]
) -> list[Executable]:
    """A change of the rows that `reservations` still own; the last statement answers with their marks."""
    marks = [(one.key, one.fence, one.token) for one in reservations]
    owned = and_(
        marked(dialect, marks, _row.key, _row.fence, _row.token),
        _row.status == PROCESSING,
        _row.expires_at > dialect.now,
        also,
    )
    change = update(records).where(_in_order(dialect, owned)).values(changes)
    if dialect.supports_returning:
        return [change.returning(_row.key, _row.fence)]
    change = change.with_hint(dialect.primary_key_hint)
    # What was ours is ours behind the change, too, and its rows are locked.
    return [change, _newest(dialect, select(_row.key, _row.fence).where(owned))]


def _in_order(dialect: Dialect, rows: ColumnElement[bool]) -> ColumnElement[bool]:
    """`rows`, locked in the order of their keys.

    Else PostgreSQL locks them as it comes by them, and batches that share some wait for each other in a circle.
    """
    if not dialect.supports_arrays:
        return rows
    return array_parameters.in_query_result(_row.key, select(_row.key).where(rows).order_by(_row.key).with_for_update())


def among(dialect: Dialect, keys: Sequence[str]) -> ColumnElement[bool]:
    """The rows of `keys`."""
    return array_parameters.equals_any(_row.key, keys) if dialect.supports_arrays else _row.key.in_(keys)


def marked(dialect: Dialect, marks: Sequence[tuple[Any, ...]], *columns: Column[Any]) -> ColumnElement[bool]:
    """The rows that have one of `marks` in these columns, the first of which is the key."""
    if dialect.supports_arrays:
        mark = array_parameters.value_table({column.name: column.type for column in columns}, marks)
        return tuple_(*columns).in_(select(*mark.c))
    found = tuple_(*columns).in_(marks)
    return found if dialect.indexes_tuples else and_(_row.key.in_([key for key, *_ in marks]), found)


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
    """Remember outcomes where the reservation is still ours.

    Executed with one set of parameters a row, or with their arrays.
    """
    if not dialect.supports_arrays:
        return settle_one_row(dialect, status)
    of, again = (dict(array_parameters.parameter_table(OUTCOME_TYPES).c) for _ in range(2))
    locked = _in_order(dialect, _owned_row(dialect, again))
    return update(records).where(locked, _row.key == of["of_key"]).values(_outcome(dialect, status, of))


def settle_one_row(dialect: Dialect, status: int) -> Update:
    """As `settle_rows`, executed with one set of parameters."""
    told = {name: bindparam(name, type_=type_) for name, type_ in OUTCOME_TYPES.items()}
    return update(records).where(_owned_row(dialect, told)).values(_outcome(dialect, status, told))


def _owned_row(dialect: Dialect, of: Mapping[str, ColumnElement[Any]]) -> ColumnElement[bool]:
    return and_(
        _row.key == of["of_key"],
        _row.fence == of["of_fence"],
        _row.token == of["of_token"],
        _row.status == PROCESSING,
        _row.expires_at > dialect.now,
    )


def _outcome(dialect: Dialect, status: int, of: Mapping[str, ColumnElement[Any]]) -> dict[str, Any]:
    return {
        "status": status,
        "settled_at": dialect.now,
        "expires_at": dialect.now + of["ttl"],
        "lease_until": null(),
        "owner": "",
        "result": of["of_result"],
        "content_type": of["of_content_type"],
        "result_dropped": of["of_result_dropped"],
        "error": of["of_error"],
    }


def select_settled(dialect: Dialect, status: int, reservations: Sequence[Reserved]) -> Select[Any]:
    """Those of `reservations` that have this outcome, now or since an earlier call: the fence names them."""
    marks = [(one.key, one.fence) for one in reservations]
    found = select(_row.key, _row.fence).where(
        marked(dialect, marks, _row.key, _row.fence), _row.status == status, _row.expires_at > dialect.now
    )
    return _newest(dialect, found)


def select_records(dialect: Dialect, keys: Sequence[str]) -> Select[Any]:
    return select(records, seen_at(dialect)).where(among(dialect, keys), _row.expires_at > dialect.now)


def seen_at(dialect: Dialect) -> ColumnElement[int]:
    """When the rows beside it were read."""
    return dialect.now.label("asked_at")


def delete_records(dialect: Dialect, keys: Sequence[str]) -> Executable:
    """Take away rows that are there; those that have expired are as good as absent, and left to be purged."""
    there = _row.expires_at > dialect.now
    if dialect.primary_key_hint:
        return _delete_by_key(dialect, keys, there)
    return delete(records).where(_in_order(dialect, and_(among(dialect, keys), there)))


def _delete_by_key(dialect: Dialect, keys: Sequence[str], also: ColumnElement[bool]) -> Executable:
    # SQLAlchemy has no hints here, nor has MySQL in the DELETE of one table.
    named = bindparam("keys", keys, expanding=True, type_=_row.key.type)
    name = records.name
    return text(f"DELETE {name} FROM {name} {dialect.primary_key_hint} WHERE `key` IN :keys AND {also}").bindparams(named)


def prefixed(prefix: str) -> ColumnElement[bool]:
    """Keys that start with `prefix`, letter for letter, as LIKE does not everywhere; found by their index.

    They are printable ASCII, and compared byte by byte: none comes between `prefix` and this end.
    """
    return and_(_row.key >= prefix, _row.key < prefix + "\x7f")


def select_page(dialect: Dialect, prefix: str, after: str, most: int) -> Select[Any]:
    """The next rows in the order of their keys."""
    return (
        select(records, seen_at(dialect))
        .where(prefixed(prefix), _row.key > after, _row.expires_at > dialect.now)
        .order_by(_row.key)
        .limit(most)
    )


def count_active(dialect: Dialect, prefix: str) -> Select[Any]:
    """How many rows hold a lease now."""
    return select(func.count()).where(
        prefixed(prefix),
        _row.status == PROCESSING,
        _row.lease_until > dialect.now,
        _row.expires_at > dialect.now,
    )


def delete_expired(dialect: Dialect, keys: Select[Any] | Sequence[str]) -> Executable:
    """Take away those of the rows that have expired; `keys` are those that `expired` finds, or asks for."""
    gone = _row.expires_at <= dialect.now
    if not isinstance(keys, Select):
        return _delete_by_key(dialect, keys, gone)
    # Asked first, and for itself: joined, PostgreSQL would read the whole table for the few rows that are found.
    return delete(records).where(
        array_parameters.in_query_result(_row.key, keys) if dialect.supports_arrays else _row.key.in_(keys), gone
    )


def select_expired(dialect: Dialect, most: int) -> Select[Any]:
    """Keys of some rows that have expired, the oldest first.

    Rows that somebody holds are passed over, so that purging waits for nobody, and nobody for ever for it.
    """
    found = select(_row.key).where(_row.expires_at <= dialect.now).order_by(_row.expires_at).limit(most)
    hinted = found.with_hint(records, dialect.expiry_index_hint) if dialect.expiry_index_hint else found
    return hinted.with_for_update(skip_locked=True)
