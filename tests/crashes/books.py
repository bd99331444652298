"""Checks of transactional work against snapshots of the database and the topic.

The invariant, no matter which process was killed: a row exists if and only if its record was completed by the same
reservation, and then each of its events is in the outbox or was published.
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
    """A row written by a handler."""

    work: str
    key: str
    fence: int


class Event(NamedTuple):
    """An event in the outbox or in the topic."""

    work: str
    step: int
    id: str
    message_key: bytes


@dataclass(frozen=True)
class Books:
    """A consistent snapshot of the database."""

    entries: Sequence[Entry]
    records: dict[str, tuple[int, int]]
    """Status and fence by key."""
    waiting: Sequence[Event]
    """Events in the outbox."""
    leases: dict[str, float]
    """End of the lease by key, in seconds of the database's clock."""

    @property
    def processing(self) -> list[str]:
        return [key for key, (status, _) in self.records.items() if status == PROCESSING]


async def read_books(url: str) -> Books:
    """Read a snapshot of the database at the SQLAlchemy URL `url`, with plain SQL."""
    address = make_url(url)
    queries = (_ENTRIES, _RECORDS, _OUTBOX)
    if address.get_backend_name() == "sqlite":
        assert address.database is not None
        with closing(sqlite3.connect(address.database, timeout=30, isolation_level=None)) as file:
            file.execute("BEGIN")
            return _books(*(file.execute(query).fetchall() for query in queries))
    connection = await asyncpg.connect(host=address.query["host"], user="postgres", database=address.database)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            return _books(*[await connection.fetch(query) for query in queries])
    finally:
        await connection.close()


def _books(entries: Sequence[Any], records: Sequence[Any], waiting: Sequence[Any]) -> Books:
    return Books(
        entries=[Entry(*row) for row in entries],
        records={key: (status, fence) for key, status, fence, _ in records},
        waiting=[_event(event_id, bytes(value), bytes(key)) for event_id, value, key in waiting],
        leases={key: lease / 1_000_000 for key, _, _, lease in records if lease is not None},
    )


def published_events(messages: Sequence[Any]) -> list[Event]:
    """Decode the messages of a consumer, duplicates included."""
    return [_event(dict(message.headers)["event_id"].decode(), message.value, message.key) for message in messages]


def _event(event_id: str, value: bytes, message_key: bytes) -> Event:
    content = json.loads(value)
    if content["event_id"] != event_id:
        raise ViolationError(f"the event {content['event_id']} was sent with the id {event_id}")
    return Event(content["work"], content["step"], event_id, message_key)


def judge_books(books: Books, published: Sequence[Event], steps: int) -> None:
    """Check the invariant that must hold at every moment.

    Args:
        books: The snapshot.
        published: Events in the topic, read after `books`.
        steps: Number of events that each job publishes.

    Raises:
        ViolationError: A row, its completion and its events do not exist together.
    """
    repeated = [key for key, times in Counter(entry.key for entry in books.entries).items() if times > 1]
    if repeated:
        raise ViolationError(f"more than one row: {repeated}")
    by_rows = {entry.key: entry.fence for entry in books.entries}
    by_records = {key: fence for key, (status, fence) in books.records.items() if status == COMPLETED}
    if by_rows != by_records:
        raise ViolationError(
            f"rows without a completion: {sorted(by_rows.keys() - by_records.keys())}; "
            f"completions without a row: {sorted(by_records.keys() - by_rows.keys())}; by another run: "
            f"{[key for key in by_rows.keys() & by_records.keys() if by_rows[key] != by_records[key]]}"
        )
    wanted = {(entry.work, step) for entry in books.entries for step in range(steps)}
    known = {(event.work, event.step) for event in (*books.waiting, *published)}
    if lost := wanted - known:
        raise ViolationError(f"events that are neither in the outbox nor published: {sorted(lost)}")
    if unfounded := {(event.work, event.step) for event in books.waiting} - wanted:
        raise ViolationError(f"events in the outbox of work that is not done: {sorted(unfounded)}")


def judge_end(books: Books, published: Sequence[Event], asked: Sequence[str], *, steps: int, in_order: bool) -> Figures:
    """Check what must hold, in addition to `judge_books`, once all work is settled.

    Args:
        books: The snapshot.
        published: Events in the topic.
        asked: Requested work, duplicates included; work that ends with `:poison` cannot be done.
        steps: Number of events that each job publishes.
        in_order: Whether jobs with the same Kafka key run one after the other.

    Raises:
        ViolationError: Work was lost, done twice, done without a request, or published out of order.
    """
    good = {work for work in asked if not work.endswith(":poison")}
    rows = Counter(entry.work for entry in books.entries)
    if rows != Counter(good):
        repeated = [work for work, times in rows.items() if times > 1]
        raise ViolationError(
            f"lost rows: {sorted(good - rows.keys())}; repeated rows: {repeated}; "
            f"rows of work that cannot be done: {sorted(rows.keys() - good)}"
        )
    if books.processing or books.waiting:
        raise ViolationError(f"unsettled records: {books.processing}; events in the outbox: {books.waiting}")
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
            f"never published: {sorted(wanted - ids.keys())}; of work that is not done: {sorted(ids.keys() - wanted)}"
        )
    if several := {step: found for step, found in ids.items() if len(found) > 1}:
        raise ViolationError(f"published under several ids: {several}")
    if len({event.id for event in published}) != len(wanted):
        raise ViolationError("several events share an id")


def _judge_order(first_copies: Sequence[Event], done: Sequence[str], *, in_order: bool) -> None:
    """Check the order of `first_copies` (the topic without duplicates) against `done` (the order of the rows)."""
    by_key: defaultdict[bytes, list[Event]] = defaultdict(list)
    for event in first_copies:
        by_key[event.message_key].append(event)
    positions = {work: index for index, work in enumerate(done)}
    for key, events in by_key.items():
        order = [(positions[event.work], event.step) for event in events]
        steps = [[step for at, step in order if at == work] for work in dict.fromkeys(at for at, _ in order)]
        if (in_order and order != sorted(order)) or any(found != sorted(found) for found in steps):
            raise ViolationError(f"events with the key {key!r} were first published in the order {events}")
