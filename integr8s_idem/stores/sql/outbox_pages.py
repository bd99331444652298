"""How many rows of the outbox a relay reads at once: limited by number and by size, so that a page is read in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Select, func, select

from integr8s_idem.stores.outbox import Claim
from integr8s_idem.stores.sql.schema import outbox

MAX_ROWS: Final = 500
"""Maximum number of rows that a relay reads at once."""

MAX_BYTES: Final = 8 * 2**20
"""Size of the messages of a page after which it has no further row; the first row may be of any size."""

_FIRST_ROWS: Final = 64
_row: Final = outbox.c


class PageRows:
    """How many rows the next page may have, as a relay's earlier pages show.

    The size of the messages alone is not enough.  MySQL reads long values to find their lengths, and a slow network may
    not carry `MAX_BYTES` in time.  So a page that was not read is tried again with fewer rows, down to one.
    """

    def __init__(self) -> None:
        self.count = _FIRST_ROWS

    def was_read(self, rows: Sequence[Any]) -> None:
        """Adapt to a page of `select_page`: long messages keep the next page near the number of rows that fit."""
        is_cut = bool(rows) and rows[-1].total >= MAX_BYTES
        self.count = min(MAX_ROWS, 2 * (len(rows) if is_cut else self.count))

    def was_not_read(self) -> None:
        self.count = max(1, self.count // 8)


def select_page(claim: Claim, after: int, besides: Sequence[str], limit: int) -> Select[Any]:
    """Select up to `limit` rows in the order of their ids; `total` is the size of the page up to and including the row.

    Only the lengths of the rows after the page are read, except by MySQL.
    """
    size = func.length(_row.value) + func.length(_row.headers) + func.coalesce(func.length(_row.message_key), 0)
    wanted = (_row.bucket.in_(claim.buckets), _row.id > after, _row.id <= claim.last, _row.topic.not_in(besides))
    first = select(_row.id, size.label("size")).where(*wanted).order_by(_row.id).limit(limit).subquery()
    total = func.sum(first.c.size).over(order_by=first.c.id, rows=(None, 0))
    summed = select(first.c.id, first.c.size, total.label("total")).subquery()
    page = (
        select(outbox, summed.c.total)
        .select_from(summed.join(outbox, _row.id == summed.c.id))
        .where(summed.c.total - summed.c.size < MAX_BYTES)
        .order_by(_row.id)
    )
    # Otherwise MySQL may read the whole table first.
    return page.prefix_with("STRAIGHT_JOIN", dialect="mysql").prefix_with("STRAIGHT_JOIN", dialect="mariadb")
