"""What is asked of the database: each verb is one statement for a whole batch, atomic per row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Executable,
    LargeBinary,
    Select,
    String,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    text,
    true,
    tuple_,
    update,
)

from integr8s_idem.records import Reserved
from integr8s_idem.stores.sql.dialects import Changes, Dialect
from integr8s_idem.stores.sql.schema import PROCESSING, records

_row = records.c


def reserving(dialect: Dialect) -> Any:
    """Reserve what is free; whatever is not comes back as it is.  Executed with one set of parameters a row.

    A row that is there is always written, with its own values where nothing changes: only so does the one
    statement answer with what decided, however many others ask at that moment.
    """
    now = dialect.now
    statement = dialect.insert(records).values(
        key=bindparam("key"),
        status=PROCESSING,
        attempt=1,
        fence=now,
        token=bindparam("token"),
        lease_until=now + bindparam("lease", type_=BigInteger),
        expires_at=now + bindparam("retention", type_=BigInteger),
        previous=0,
        fingerprint=bindparam("fingerprint"),
        owner=bindparam("owner"),
        trace=bindparam("trace"),
        result_dropped=False,
        error="",
    )
    statement = dialect.upsert(statement, _row.key, lambda new: _taken_over(new, now))
    return statement.returning(*_row, now.label("asked_at")) if dialect.returns else statement


def reserved(dialect: Dialect, keys: Sequence[str]) -> Select[Any]:
    """What `reserving` has left behind, where it cannot say so: asked in its transaction, which holds the rows."""
    return _newest(dialect, select(*_row, dialect.now.label("asked_at")).where(_row.key.in_(keys)))


def _newest(dialect: Dialect, asked: Select[Any]) -> Select[Any]:
    """`asked` of the rows as they are: at REPEATABLE READ a plain SELECT is answered from before others wrote them."""
    return asked.with_hint(records, dialect.by_key).with_for_update() if dialect.by_key else asked


def _taken_over(new: Any, now: ColumnElement[int]) -> Changes:
    """What becomes of a row that is there: taken anew, taken over, found again by its owner, or left alone.

    MySQL writes these one after the other, and each sees what those before it wrote.  So the five columns that decide
    come last, and in an order in which nothing written so far changes whether the row is taken: a row that is
    taken has the status, the payload and then the token that make it `ours` whatever its lease, and its expiry, which
    makes it `gone`, is written when nobody asks any more.
    """
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

    next_fence = case((_row.fence >= new.fence, _row.fence + 1), else_=new.fence)
    taken = or_(gone, ours, free)
    return {
        "attempt": where((gone, 1), (ours, _row.attempt), (free, _row.attempt + 1), column=_row.attempt),
        "fence": where((gone, next_fence), (ours, _row.fence), (free, next_fence), column=_row.fence),
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


def renewing(dialect: Dialect, reservations: Sequence[Reserved], lease: int) -> list[Executable]:
    """Let leases end `lease` microseconds from now."""
    until = dialect.now + literal(lease, BigInteger)
    # The record outlives its lease, so that the attempt still counts.
    keeps = case((_row.expires_at < until, dialect.now + literal(2 * lease, BigInteger)), else_=_row.expires_at)
    changes = {"lease_until": until, "expires_at": keeps}
    return _held(dialect, reservations, _row.lease_until.is_not(None), changes)


def releasing(dialect: Dialect, reservations: Sequence[Reserved]) -> list[Executable]:
    """Let leases end now."""
    return _held(dialect, reservations, true(), {"lease_until": null()})


def _held(
    dialect: Dialect, reservations: Sequence[Reserved], also: ColumnElement[bool], changes: dict[str, Any]
) -> list[Executable]:
    """A change of the rows that `reservations` still own; the last statement answers with their marks."""
    marks = [(one.key, one.fence, one.token) for one in reservations]
    owned = and_(
        _marked(dialect, marks, _row.key, _row.fence, _row.token),
        _row.status == PROCESSING,
        _row.expires_at > dialect.now,
        also,
    )
    change = update(records).where(owned).values(changes)
    if dialect.returns:
        return [change.returning(_row.key, _row.fence)]
    change = change.with_hint(dialect.by_key)
    # What was ours is ours behind the change, too, and its rows are locked.
    return [change, _newest(dialect, select(_row.key, _row.fence).where(owned))]


def _marked(dialect: Dialect, marks: Sequence[tuple[Any, ...]], *columns: ColumnElement[Any]) -> ColumnElement[bool]:
    found = tuple_(*columns).in_(marks)
    return found if dialect.finds_tuples else and_(_row.key.in_([key for key, *_ in marks]), found)


def settling(dialect: Dialect, status: int) -> Update:
    """Remember outcomes where the reservation is still ours.  Executed with one set of parameters a row."""
    return (
        update(records)
        .where(
            _row.key == bindparam("of_key"),
            _row.fence == bindparam("of_fence"),
            _row.token == bindparam("of_token"),
            _row.status == PROCESSING,
            _row.expires_at > dialect.now,
        )
        .values(
            status=status,
            settled_at=dialect.now,
            expires_at=dialect.now + bindparam("ttl", type_=BigInteger),
            lease_until=null(),
            owner="",
            result=bindparam("of_result", type_=LargeBinary),
            content_type=bindparam("of_content_type", type_=String),
            result_dropped=bindparam("of_result_dropped", type_=Boolean),
            error=bindparam("of_error", type_=String),
        )
    )


def settled_so(dialect: Dialect, status: int, reservations: Sequence[Reserved]) -> Select[Any]:
    """Those of `reservations` that have this outcome, now or since an earlier call: the fence names them."""
    marks = [(one.key, one.fence) for one in reservations]
    found = select(_row.key, _row.fence).where(
        _marked(dialect, marks, _row.key, _row.fence), _row.status == status, _row.expires_at > dialect.now
    )
    return _newest(dialect, found)


def reading(dialect: Dialect, keys: Sequence[str]) -> Select[Any]:
    return select(records).where(_row.key.in_(keys), _row.expires_at > dialect.now)


def deleting(dialect: Dialect, keys: Sequence[str]) -> Executable:
    """Take away rows that are there; those that have expired are as good as absent, and left to be purged."""
    return _deleting(dialect, keys, _row.expires_at > dialect.now)


def _deleting(dialect: Dialect, keys: Select[Any] | Sequence[str], also: ColumnElement[bool]) -> Executable:
    if not dialect.by_key:
        return delete(records).where(_row.key.in_(keys), also)
    # SQLAlchemy has no hints here, nor has MySQL in the DELETE of one table.
    named = bindparam("keys", keys, expanding=True, type_=_row.key.type)
    name = records.name
    return text(f"DELETE {name} FROM {name} {dialect.by_key} WHERE `key` IN :keys AND {also}").bindparams(named)


def page(dialect: Dialect, prefix: str, after: str, most: int) -> Select[Any]:
    """The next rows in the order of their keys."""
    return (
        select(records)
        .where(_row.key.startswith(prefix, autoescape=True), _row.key > after, _row.expires_at > dialect.now)
        .order_by(_row.key)
        .limit(most)
    )


def active(dialect: Dialect, prefix: str) -> Select[Any]:
    """How many rows hold a lease now."""
    return select(func.count()).where(
        _row.key.startswith(prefix, autoescape=True),
        _row.status == PROCESSING,
        _row.lease_until > dialect.now,
        _row.expires_at > dialect.now,
    )


def purging(dialect: Dialect, keys: Select[Any] | Sequence[str]) -> Executable:
    """Take away those of the rows that have expired."""
    return _deleting(dialect, keys, _row.expires_at <= dialect.now)


def expired(dialect: Dialect, most: int) -> Select[Any]:
    """Keys of some rows that have expired, the oldest first.

    Rows that somebody holds are passed over, so that purging waits for nobody, and nobody for ever for it.
    """
    found = select(_row.key).where(_row.expires_at <= dialect.now).order_by(_row.expires_at).limit(most)
    hinted = found.with_hint(records, dialect.by_expiry) if dialect.by_expiry else found
    return hinted.with_for_update(skip_locked=True)
