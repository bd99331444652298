"""Statements for the administration of records."""

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
from integr8s_idem.stores.sql.statements import has_key, matches_any, prefixed, seen_at

_row = records.c

LONG_RESULT: Final = 4_096
"""Size in bytes above which a survey reads a result separately, because hundreds of rows may have a megabyte each."""


def select_key_range(dialect: Dialect, prefix: str, after: str, limit: int) -> Executable:
    """Select the last of the next keys and their number, including expired ones."""
    keys = select(_row.key).where(prefixed(prefix), _row.key > after).order_by(_row.key).limit(limit).subquery()
    return select(func.max(keys.c.key), func.count())


def select_survey(
    dialect: Dialect, prefix: str, holding: Sequence[str], after: str, last: str, limit: int
) -> Select[Any]:
    """Select rows in a range whose keys contain all parts of `holding`.  `is_long` marks rows without their result."""
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
        .where(*(_position(dialect, part) > 0 for part in holding))
        .order_by(_row.key)
        .limit(limit)
    )


def _position(dialect: Dialect, part: str) -> ColumnElement[Any]:
    # Not LIKE, which ignores case in some databases.
    function = func.strpos if dialect.supports_arrays else func.instr
    return cast("ColumnElement[Any]", function(_row.key, literal(part, _row.key.type)))


def estimate_size(dialect: Dialect) -> Executable:
    """Select the approximate number of rows."""
    return text(dialect.size_sql)


def select_unchanged(dialect: Dialect, versions: Sequence[tuple[str, int, int, int]]) -> Executable:
    """Select and lock, in key order, the keys of rows that still have this status, fence and end of lease (0: none)."""
    groups: list[ColumnElement[bool]] = []
    held = [(key, fence, lease) for key, status, fence, lease in versions if status == PROCESSING and lease]
    released = [(key, fence) for key, status, fence, lease in versions if status == PROCESSING and not lease]
    settled = [(key, status, fence) for key, status, fence, _ in versions if status != PROCESSING]
    if held:
        matches = matches_any(dialect, held, _row.key, _row.fence, _row.lease_until)
        groups.append(and_(matches, _row.status == PROCESSING))
    if released:
        matches = matches_any(dialect, released, _row.key, _row.fence)
        groups.append(and_(matches, _row.status == PROCESSING, _row.lease_until.is_(None)))
    if settled:
        groups.append(matches_any(dialect, settled, _row.key, _row.status, _row.fence))
    found = select(_row.key).where(or_(*groups), _row.expires_at > dialect.now).order_by(_row.key)
    hinted = found.with_hint(records, dialect.primary_key_hint) if dialect.primary_key_hint else found
    return hinted.with_for_update()


def end_leases(dialect: Dialect, keys: Sequence[str]) -> Executable:
    """End leases now."""
    change = update(records).where(has_key(dialect, keys), _row.status == PROCESSING).values(lease_until=null())
    return change.with_hint(dialect.primary_key_hint) if dialect.primary_key_hint else change
