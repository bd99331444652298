"""What a database and a topic say of transactional work, read from outside, and what must hold of it.

At every moment, whoever was killed before: a row is there if and only if its record is completed, by the same
reservation, and then each of its events waits in the outbox or was published.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import asyncpg
from sqlalchemy.engine import make_url

from tests.campaigns.figures import Figures, ViolationError

COMPLETED: Final = 2
PROCESSING: Final = 1

_ENTRIES: Final = "SELECT work, key, fence FROM entries ORDER BY id"
_RECORDS: Final = "SELECT key, status, fence, lease_until FROM idempotency_records"
_OUTBOX: Final = "SELECT event_id, value, message_key FROM idempotency_outbox ORDER BY id"


class Entry(NamedTuple):
    """One effect."""

    work: str
    key: str
    fence: int


class Event(NamedTuple):
    """One event, as it waits or as it was published."""

    work: str
    step: int
    id: str
    line: bytes
    """The Kafka key."""


@dataclass(frozen=True)
class Books:
    """What one transaction sees of a database."""

    entries: Sequence[Entry]
    records: dict[str, tuple[int, int]]
    """Status and fence by key."""
    waiting: Sequence[Event]
    """In the outbox."""
    leases: dict[str, float]
    """By key: when the lease ends, or ended; seconds of the database's clock."""

    @property
    def processing(self) -> list[str]:
        return [key for key, (status, _) in self.records.items() if status == PROCESSING]


async def read_books(url: str) -> Books:
    """What the database of `url`, as SQLAlchemy writes it, says now: by plain SQL, in one snapshot."""
    address = make_url(url)
    asked = (_ENTRIES, _RECORDS, _OUTBOX)
    if address.get_backend_name() == "sqlite":
        assert address.database is not None
        with closing(sqlite3.connect(address.database, timeout=30, isolation_level=None)) as file:
            file.execute("BEGIN")
            return _books(*(file.execute(query).fetchall() for query in asked))
    connection = await asyncpg.connect(host=address.query["host"], user="postgres", database=address.database)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return _books(*[await connection.fetch(query) for query in asked])
    finally:
        await connection.close()


def _books(entries: Sequence[Any], records: Sequence[Any], waiting: Sequence[Any]) -> Books:
    return Books(
        entries=[Entry(*row) for row in entries],
        records={key: (status, fence) for key, status, fence, _ in records},
        waiting=[_event(event_id, bytes(value), bytes(line)) for event_id, value, line in waiting],
        leases={key: lease / 1_000_000 for key, _, _, lease in records if lease is not None},
    )


def published_events(messages: Sequence[Any]) -> list[Event]:
    """Those that a consumer has read, copies included."""
    return [_event(dict(one.headers)["event_id"].decode(), one.value, one.key) for one in messages]


def _event(event_id: str, value: bytes, line: bytes) -> Event:
    told = json.loads(value)
    if told["event_id"] != event_id:
        raise ViolationError(f"the event {told['event_id']} travels as {event_id}")
    return Event(told["work"], told["step"], event_id, line)


def judge_books(books: Books, published: Sequence[Event], steps: int) -> None:
    """What must hold at every moment.

    Args:
        published: Read after the books.
        steps: How many events each work leaves behind.

    Raises:
        ViolationError: An effect, a completion and its events are not there together.
    """
    twice = [key for key, times in Counter(entry.key for entry in books.entries).items() if times > 1]
    if twice:
        raise ViolationError(f"more than one row: {twice}")
    by_rows = {entry.key: entry.fence for entry in books.entries}
    by_records = {key: fence for key, (status, fence) in books.records.items() if status == COMPLETED}
    if by_rows != by_records:
        raise ViolationError(
            f"rows without a completion: {sorted(by_rows.keys() - by_records.keys())}; "
            f"completions without a row: {sorted(by_records.keys() - by_rows.keys())}; of another run: "
            f"{[key for key in by_rows.keys() & by_records.keys() if by_rows[key] != by_records[key]]}"
        )
    wanted = {(entry.work, step) for entry in books.entries for step in range(steps)}
    known = {(event.work, event.step) for event in (*books.waiting, *published)}
    if lost := wanted - known:
        raise ViolationError(f"events that neither wait nor were published: {sorted(lost)}")
    if unfounded := {(event.work, event.step) for event in books.waiting} - wanted:
        raise ViolationError(f"events that wait for work that is not done: {sorted(unfounded)}")


def judge_end(books: Books, published: Sequence[Event], asked: Sequence[str], *, steps: int, in_order: bool) -> Figures:
    """What must hold once nothing is left to do, beside `judge_books`.

    Args:
        asked: The works, copies included; those that end with `:poison` cannot be done.
        in_order: Whether works of one Kafka key were done one after the other.

    Raises:
        ViolationError: Something was lost, done twice, done for nobody, or published out of order.
    """
    good = {work for work in asked if not work.endswith(":poison")}
    rows = Counter(entry.work for entry in books.entries)
    if rows != Counter(good):
        twice = [work for work, times in rows.items() if times > 1]
        raise ViolationError(
            f"rows lost: {sorted(good - rows.keys())}; too many: {twice}; "
            f"of work that cannot be done: {sorted(rows.keys() - good)}"
        )
    if books.processing or books.waiting:
        raise ViolationError(f"records that nobody settles: {books.processing}; events that wait: {books.waiting}")
    _judge_ids(published, {(work, step) for work in good for step in range(steps)})
    _judge_order(list(dict.fromkeys(published)), [entry.work for entry in books.entries], in_order=in_order)
    return Figures(
        events=len(asked), lost=0, repeats=0, fenced_repeats=0, done=len(good), completed=len(good),
        published=len(published), published_again=len(published) - len(good) * steps,
    )  # fmt: skip


def _judge_ids(published: Collection[Event], wanted: set[tuple[str, int]]) -> None:
    ids: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for event in published:
        ids[event.work, event.step].add(event.id)
    if ids.keys() != wanted:
        raise ViolationError(
            f"never published: {sorted(wanted - ids.keys())}; for work that is not done: {sorted(ids.keys() - wanted)}"
        )
    if many := {of: found for of, found in ids.items() if len(found) > 1}:
        raise ViolationError(f"published under several ids: {many}")
    if len({event.id for event in published}) != len(wanted):
        raise ViolationError("several events share an id")


def _judge_order(first_sights: Sequence[Event], done: Sequence[str], *, in_order: bool) -> None:
    """`done`: in the order of the rows; `first_sights`: in that of the topic, each event once."""
    lines: defaultdict[bytes, list[Event]] = defaultdict(list)
    for event in first_sights:
        lines[event.line].append(event)
    place = {work: index for index, work in enumerate(done)}
    for line, events in lines.items():
        seen = [(place[event.work], event.step) for event in events]
        steps = [[step for at, step in seen if at == one] for one in dict.fromkeys(at for at, _ in seen)]
        if (in_order and seen != sorted(seen)) or any(one != sorted(one) for one in steps):
            raise ViolationError(f"events of {line!r} were first seen in the order {events}")
