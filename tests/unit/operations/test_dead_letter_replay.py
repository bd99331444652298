"""Replays of dead letters: which are published, which are skipped, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem import MemoryIdempotencyRepository, Settings
from integr8s_idem.cli.dlq_output import report_text
from integr8s_idem.config import MemoryStoreSettings, RedisStoreSettings, SqliteStoreSettings
from integr8s_idem.errors import ApplicationError, CorruptRecordError, EventTooLargeError, PublishError
from integr8s_idem.operations.atomic_file import open_atomically
from integr8s_idem.operations.dead_letter_records import RecordLookup, open_record_lookup
from integr8s_idem.operations.dead_letter_replay import SKIP_REASONS, Replayer, ReplayStatus, Report
from integr8s_idem.operations.dead_letters import StoredDeadLetter
from integr8s_idem.records import Completion, Failure, IdempotencyRecord, Reserved
from integr8s_idem.testing.store_under_test import wish
from tests.support.dead_letters import dead_letter_of
from tests.support.fake_consumer import FakeRecord

TOPICS = {"order_placed", "order_placed.dlq"}


class FakePublisher:
    """Records messages, except to refused topics."""

    def __init__(self, refused: dict[str, Any] | None = None) -> None:
        self.sent: list[Any] = []
        self.asked = 0
        self._refused = refused or {}

    async def send_all(self, messages: Sequence[Any]) -> list[Any]:
        self.asked += len(messages)
        self.sent += [message for message in messages if message.topic not in self._refused]
        return [self._refused.get(message.topic) for message in messages]


class Store(MemoryIdempotencyRepository):
    """A store that counts reads and can contain damaged records."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.damaged: set[str] = set()

    async def get(self, keys: Sequence[str]) -> list[IdempotencyRecord | None]:
        self.calls += 1
        for key in keys:
            if key in self.damaged:
                raise CorruptRecordError(key, "cut off")
        return await super().get(keys)

    async def held(self, key: str) -> Reserved:
        (verdict,) = await self.reserve([wish(key)])
        assert isinstance(verdict, Reserved)
        return verdict


def record_of(number: int, generation: int) -> str:
    return f"idempotency:billing:charge:order_placed:id:event-{number};{generation}"


async def replayed(dead_letters: Sequence[FakeRecord], store: Any = None, publisher: Any = None) -> Report:
    report = Report()
    await Replayer(TOPICS, RecordLookup(store), publisher, report).replay(
        [StoredDeadLetter(dead_letter) for dead_letter in dead_letters]
    )
    return report


async def test_dead_letters_that_were_already_replayed_are_found_in_one_read_and_skipped() -> None:
    store, publisher = Store(), FakePublisher()
    await store.complete([Completion(reservation=await store.held(record_of(1, 1)), ttl=timedelta(days=1))])
    await store.fail([Failure(reservation=await store.held(record_of(2, 1)), ttl=timedelta(days=1), error="no")])
    await store.held(record_of(3, 1))
    await store.complete([Completion(reservation=await store.held(record_of(4, 3)), ttl=timedelta(days=1))])
    dead_letters = [
        dead_letter_of(1),
        dead_letter_of(2),
        dead_letter_of(3),
        dead_letter_of(4, generation=2),
        dead_letter_of(4, generation=1, offset=9),
    ]

    report = await replayed(dead_letters, store, publisher)

    assert report.skipped == {ReplayStatus.HANDLED: 2, ReplayStatus.FAILED_AGAIN: 1, ReplayStatus.IN_PROGRESS: 1}
    assert report.examples[ReplayStatus.HANDLED] == ["order_placed.dlq:0:1", "order_placed.dlq:0:4"]
    assert [dict(message.headers)["idempotency-generation"] for message in publisher.sent] == [b"2"]
    assert store.calls == 1


async def test_a_corrupt_record_does_not_affect_other_dead_letters() -> None:
    store = Store()
    await store.complete([Completion(reservation=await store.held(record_of(1, 1)), ttl=timedelta(days=1))])
    store.damaged = {record_of(2, 1)}

    report = await replayed([dead_letter_of(number) for number in (1, 2, 3)], store)

    assert report.skipped == {ReplayStatus.HANDLED: 1, ReplayStatus.UNREADABLE: 1}
    assert report.published == 1


def odd(*headers: tuple[str, bytes]) -> FakeRecord:
    record = dead_letter_of()
    return FakeRecord(record.topic, 0, 1, record.key, record.value, [*record.headers, *headers])


def elsewhere(dead_letter: FakeRecord) -> FakeRecord:
    return FakeRecord("kept", 0, 1, dead_letter.key, dead_letter.value, dead_letter.headers)


@pytest.mark.parametrize(
    ("dead_letter", "status"),
    [
        (FakeRecord("order_placed.dlq", 0, 1, None, b"by another program"), ReplayStatus.NOT_A_DEAD_LETTER),
        (odd(("idempotency-dlq-dropped", b"value")), ReplayStatus.INCOMPLETE),
        (dead_letter_of(generation=999), ReplayStatus.GENERATION_LIMIT),
        (odd(("idempotency-dlq-generation", b"one")), ReplayStatus.BAD_GENERATION),
        (elsewhere(dead_letter_of()), ReplayStatus.NO_DEAD_LETTER_TOPIC),
        (dead_letter_of(topic="gone"), ReplayStatus.NO_TOPIC),
    ],
)
async def test_dead_letters_that_cannot_be_replayed_are_counted_by_reason(
    dead_letter: FakeRecord, status: ReplayStatus
) -> None:
    publisher = FakePublisher()

    report = await replayed([dead_letter, dead_letter_of(2)], publisher=publisher)

    assert report.skipped == {status: 1}
    assert len(publisher.sent) == report.published == 1


async def test_a_topic_that_refuses_messages_is_not_tried_again_and_other_topics_continue() -> None:
    refused = {"order_placed": PublishError("order_placed", "not authorised")}
    publisher, report = FakePublisher(refused), Report()
    replayer = Replayer({"order_placed", "order_paid"}, RecordLookup(None), publisher, report)  # type: ignore[arg-type]

    for start in (0, 2):
        await replayer.replay([StoredDeadLetter(dead_letter_of(number)) for number in range(start, start + 2)])
        await replayer.replay([StoredDeadLetter(dead_letter_of(start, topic="order_paid"))])

    assert report.skipped == {ReplayStatus.NOT_CONFIRMED: 4}
    assert "not authorised" in report.errors["order_placed"]
    assert report.published == 2
    assert publisher.asked == 4


async def test_a_dead_letter_that_is_too_large_for_its_topic_is_skipped() -> None:
    publisher = FakePublisher({"order_placed": EventTooLargeError("order_placed", 9, 8)})

    assert (await replayed([dead_letter_of()], publisher=publisher)).skipped == {ReplayStatus.TOO_LARGE: 1}


async def test_the_report_counts_dead_letters_without_a_record() -> None:
    report = await replayed([dead_letter_of(1), dead_letter_of(2, guarded=False)])

    assert report.published == 2
    assert "1 of them without a record" in report_text(report, "to replay")


async def test_the_report_lists_skipped_dead_letters_with_reason_and_places() -> None:
    report = await replayed([dead_letter_of(number, topic="gone") for number in range(5)] + [dead_letter_of(1)])

    assert report_text(report, "replayed").splitlines() == [
        "1 dead letter replayed",
        "  1  order_placed.dlq  billing  handler_failed  ValueError",
        "  to topic order_placed: 1",
        "5 dead letters skipped: the original topic no longer exists",
        "  gone.dlq:0:0, gone.dlq:0:1, gone.dlq:0:2, …",
    ]


def test_every_reason_has_a_description() -> None:
    assert set(SKIP_REASONS) == set(ReplayStatus) - {ReplayStatus.PUBLISHED}


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        (MemoryStoreSettings(kind="memory"), ""),
        (SqliteStoreSettings(kind="sqlite", path="gone/idem.db"), "file gone/idem.db of [store] path does not exist"),
        (RedisStoreSettings(url="redis://127.0.0.1:1/0", timeout_seconds=0.5), "no connection to Redis"),
    ],
)
async def test_replays_are_possible_while_the_store_is_unavailable(store: Any, problem: str) -> None:
    async with open_record_lookup(Settings(store=store)) as records:
        known = [await records.replay_records([StoredDeadLetter(dead_letter_of(number))]) for number in range(2)]

        assert known == [[None], [None]]
        assert problem in records.problem
        assert bool(problem) == bool(records.problem)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "dead-letters.jsonl"
    with pytest.raises(ZeroDivisionError), open_atomically(file) as opened:
        opened.write("half" * (1 // 0))
    assert list(tmp_path.iterdir()) == []

    with open_atomically(file) as opened:
        opened.write("all")
        assert not file.exists()

    with pytest.raises(ApplicationError, match="already exists"), open_atomically(file):
        pass
    with open_atomically(file, replace=True) as opened:
        opened.write("new")
    assert file.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["dead-letters.jsonl"]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="cannot write"), open_atomically(tmp_path / "gone" / "file"):
        pass
