"""What differs between the databases, in one place."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import BigInteger, ColumnElement, bindparam, literal_column
from sqlalchemy.dialects import postgresql, sqlite

from integr8s_idem.errors import StoreConfigurationError


@dataclass(frozen=True)
class Dialect:
    """One kind of database."""

    name: str
    insert: Callable[[Any], Any]
    """An INSERT that can say what to do about a row that is there already."""
    now: ColumnElement[int]
    """The database's clock, read once per statement: microseconds since 1970."""
    times: Callable[[], dict[str, int]]
    """Parameters that `now` needs."""


def dialect_of(name: str) -> Dialect:
    """The one that SQLAlchemy calls `name`.

    Raises:
        StoreConfigurationError: Records cannot be kept in such a database.
    """
    found = _DIALECTS.get(name)
    if found is None:
        raise StoreConfigurationError(
            "start", f"no store for {name} databases; there are {', '.join(sorted(_DIALECTS))}"
        )
    return found


def _nothing() -> dict[str, int]:
    return {}


def _this_machines_time() -> dict[str, int]:
    # SQLite runs in our process: its clock is ours, and what it tells of it has a resolution of a millisecond only.
    return {"now": time.time_ns() // 1_000}


_DIALECTS: Final = {
    "postgresql": Dialect(
        name="postgresql",
        insert=postgresql.insert,
        now=literal_column("(extract(epoch from statement_timestamp()) * 1000000)::bigint", BigInteger),
        times=_nothing,
    ),
    "sqlite": Dialect(
        name="sqlite", insert=sqlite.insert, now=bindparam("now", type_=BigInteger), times=_this_machines_time
    ),
}
