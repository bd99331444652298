"""What is asked for people, who go through all records and change what they have seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from sqlalchemy import (
    ColumnElement,
    Executable,
    Select,
    and_,
    case,
    false,
    func,
    literal,
    null,
    or_,
    select,
    text,
    update,
)

from integr8s_idem.stores.sql.dialects import Dialect
from integr8s_idem.stores.sql.schema import PROCESSING, records
from integr8s_idem.stores.sql.statements import among, marked, prefixed, seen_at

_row = records.c

LONG_RESULT: Final = 4_096
"""Bytes of a result that is not read together with others by a survey: hundreds of them may be a megabyte each."""


def select_key_range(dialect: Dialect, prefix: str, after: str, most: int) -> Executable:
    """The last of the next keys, and how many they are, expired ones included."""
    keys = select(_row.key).where(prefixed(prefix), _row.key > after).order_by(_row.key).limit(most).subquery()
    return select(func.max(keys.c.key), func.count())


def select_survey(dialect: Dialect, prefix: str, holding: Sequence[str], after: str, last: str, most: int) -> Select[Any]:
    """Rows of a stretch whose keys hold some parts.  Long results are left out, and their rows marked."""
    length = func.length(_row.result)
    columns = [column for column in _row if column is not _row.result]
    return (
        select(
            *columns,
            case((length <= LONG_RESULT, _row.result), else_=null()).label("result"),
            func.coalesce(length > LONG_RESULT, false()).label("is_long"),
            seen_at(dialect),
        )
        .where(_row.key > after, _row.key <= last, prefixed(prefix), _row.expires_at > dialect.now)
        .where(*(_place(dialect, part) > 0 for part in holding))
        .order_by(_row.key)
        .limit(most)
    )


def _place(dialect: Dialect, part: str) -> ColumnElement[Any]:
    # LIKE ignores case in some databases.
    place = func.strpos if dialect.supports_arrays else func.instr
    return cast("ColumnElement[Any]", place(_row.key, literal(part, _row.key.type)))


def estimate_size(dialect: Dialect) -> Executable:
    """About how many rows there are."""
    return text(dialect.size_sql)


def select_unchanged(dialect: Dialect, marks: Sequence[tuple[str, int, int, int]]) -> Executable:
    """Keys of rows that still have this status, fence and end of lease (0 for none), locked in their order."""
    groups: list[ColumnElement[bool]] = []
    held = [(key, fence, lease) for key, status, fence, lease in marks if status == PROCESSING and lease]
    released = [(key, fence) for key, status, fence, lease in marks if status == PROCESSING and not lease]
    settled = [(key, status, fence) for key, status, fence, _ in marks if status != PROCESSING]
    if held:
        still = marked(dialect, held, _row.key, _row.fence, _row.lease_until)
        groups.append(and_(still, _row.status == PROCESSING))
    if released:
        still = marked(dialect, released, _row.key, _row.fence)
        groups.append(and_(still, _row.status == PROCESSING, _row.lease_until.is_(None)))
    if settled:
        groups.append(marked(dialect, settled, _row.key, _row.status, _row.fence))
    found = select(_row.key).where(or_(*groups), _row.expires_at > dialect.now).order_by(_row.key)
    hinted = found.with_hint(records, dialect.primary_key_hint) if dialect.primary_key_hint else found
    return hinted.with_for_update()


def end_leases(dialect: Dialect, keys: Sequence[str]) -> Executable:
    """Let the leases of rows end now."""
    change = update(records).where(among(dialect, keys), _row.status == PROCESSING).values(lease_until=null())
    return change.with_hint(dialect.primary_key_hint) if dialect.primary_key_hint else change
