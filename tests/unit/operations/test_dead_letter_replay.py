"""What becomes of dead letters in a replay."""

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
from integr8s_idem.operations.atomic_file import whole_file
from integr8s_idem.operations.dead_letter_records import DeadLetterRecords, open_letter_records
from integr8s_idem.operations.dead_letter_replay import TOLD, Fate, Replayer, Report
from integr8s_idem.operations.dead_letters import Letter
from integr8s_idem.records import Completion, Failure, IdempotencyRecord, Reserved
from integr8s_idem.testing.store_under_test import wish
from tests.support.dead_letters import letter_of
from tests.support.fake_consumer import FakeRecord

TOPICS = {"order_placed", "order_placed.dlq"}


class FakePublisher:
    """Takes what it is given, but for some."""

    def __init__(self, refused: dict[str, Any] | None = None) -> None:
        self.sent: list[Any] = []
        self.asked = 0
        self._refused = refused or {}

    async def send_all(self, messages: Sequence[Any]) -> list[Any]:
        self.asked += len(messages)
        self.sent += [message for message in messages if message.topic not in self._refused]
        return [self._refused.get(message.topic) for message in messages]


class Store(MemoryIdempotencyRepository):
    """Records of generation 1 of orders, by what became of them; asked how often, and some of them damaged."""

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


async def taken(letters: Sequence[FakeRecord], store: Any = None, publisher: Any = None) -> Report:
    report = Report()
    await Replayer(TOPICS, DeadLetterRecords(store), publisher, report).take([Letter(letter) for letter in letters])
    return report


async def test_what_the_store_knows_of_a_replay_is_asked_in_one_call_and_left_out() -> None:
    store, publisher = Store(), FakePublisher()
    await store.complete([Completion(reservation=await store.held(record_of(1, 1)), ttl=timedelta(days=1))])
    await store.fail([Failure(reservation=await store.held(record_of(2, 1)), ttl=timedelta(days=1), error="no")])
    await store.held(record_of(3, 1))
    await store.complete([Completion(reservation=await store.held(record_of(4, 3)), ttl=timedelta(days=1))])
    letters = [
        letter_of(1),
        letter_of(2),
        letter_of(3),
        letter_of(4, generation=2),
        letter_of(4, generation=1, offset=9),
    ]

    report = await taken(letters, store, publisher)

    assert report.left_out == {Fate.HANDLED: 2, Fate.FAILED_AGAIN: 1, Fate.UNDER_WAY: 1}
    assert report.examples[Fate.HANDLED] == ["order_placed.dlq:0:1", "order_placed.dlq:0:4"]
    assert [dict(message.headers)["idempotency-generation"] for message in publisher.sent] == [b"2"]
    assert store.calls == 1


async def test_a_record_that_cannot_be_read_spoils_no_other() -> None:
    store = Store()
    await store.complete([Completion(reservation=await store.held(record_of(1, 1)), ttl=timedelta(days=1))])
    store.damaged = {record_of(2, 1)}

    report = await taken([letter_of(number) for number in (1, 2, 3)], store)

    assert report.left_out == {Fate.HANDLED: 1, Fate.UNREADABLE: 1}
    assert report.published == 1


def odd(*headers: tuple[str, bytes]) -> FakeRecord:
    record = letter_of()
    return FakeRecord(record.topic, 0, 1, record.key, record.value, [*record.headers, *headers])


def elsewhere(letter: FakeRecord) -> FakeRecord:
    return FakeRecord("kept", 0, 1, letter.key, letter.value, letter.headers)


@pytest.mark.parametrize(
    ("letter", "fate"),
    [
        (FakeRecord("order_placed.dlq", 0, 1, None, b"by another program"), Fate.NO_LETTER),
        (odd(("idempotency-dlq-dropped", b"value")), Fate.NOT_WHOLE),
        (letter_of(generation=999), Fate.TOO_OFTEN),
        (odd(("idempotency-dlq-generation", b"one")), Fate.BAD_GENERATION),
        (elsewhere(letter_of()), Fate.NO_DEAD_LETTER_TOPIC),
        (letter_of(topic="gone"), Fate.NO_TOPIC),
    ],
)
async def test_what_cannot_be_replayed_is_counted_by_its_reason_and_stops_nothing(
    letter: FakeRecord, fate: Fate
) -> None:
    publisher = FakePublisher()

    report = await taken([letter, letter_of(2)], publisher=publisher)

    assert report.left_out == {fate: 1}
    assert len(publisher.sent) == report.published == 1


async def test_a_topic_that_takes_nothing_is_tried_no_more_and_the_others_get_theirs() -> None:
    refused = {"order_placed": PublishError("order_placed", "not authorised")}
    publisher, report = FakePublisher(refused), Report()
    replayer = Replayer({"order_placed", "order_paid"}, DeadLetterRecords(None), publisher, report)  # type: ignore[arg-type]

    for start in (0, 2):
        await replayer.take([Letter(letter_of(number)) for number in range(start, start + 2)])
        await replayer.take([Letter(letter_of(start, topic="order_paid"))])

    assert report.left_out == {Fate.NOT_CONFIRMED: 4}
    assert "not authorised" in report.errors["order_placed"]
    assert report.published == 2
    assert publisher.asked == 4


async def test_a_letter_that_is_too_large_for_its_topic_is_left_out() -> None:
    publisher = FakePublisher({"order_placed": EventTooLargeError("order_placed", 9, 8)})

    assert (await taken([letter_of()], publisher=publisher)).left_out == {Fate.TOO_LARGE: 1}


async def test_of_letters_without_a_record_it_is_said_that_nothing_tells_whether_they_were_replayed() -> None:
    report = await taken([letter_of(1), letter_of(2, guarded=False)])

    assert report.published == 2
    assert "1 of them name no record" in report_text(report, "to be replayed")


async def test_the_report_says_what_is_left_out_why_and_where() -> None:
    report = await taken([letter_of(number, topic="gone") for number in range(5)] + [letter_of(1)])

    assert report_text(report, "replayed").splitlines() == [
        "1 letter replayed",
        "  1  order_placed.dlq  billing  handler_failed  ValueError",
        "  to topic order_placed: 1",
        "5 letters left out: the topic they came from is not there any more",
        "  gone.dlq:0:0, gone.dlq:0:1, gone.dlq:0:2, …",
    ]


def test_every_reason_has_words() -> None:
    assert set(TOLD) == set(Fate) - {Fate.PUBLISHED}


@pytest.mark.parametrize(
    ("store", "problem"),
    [
        (MemoryStoreSettings(kind="memory"), ""),
        (SqliteStoreSettings(kind="sqlite", path="gone/idem.db"), "there is no file gone/idem.db"),
        (RedisStoreSettings(url="redis://127.0.0.1:1/0", timeout_seconds=0.5), "no connection to Redis"),
    ],
)
async def test_a_store_that_tells_nothing_keeps_nobody_from_replaying(store: Any, problem: str) -> None:
    async with open_letter_records(Settings(store=store)) as records:
        known = [await records.of_replays([Letter(letter_of(number))]) for number in range(2)]

        assert known == [[None], [None]]
        assert problem in records.problem
        assert bool(problem) == bool(records.problem)


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "letters.jsonl"
    with pytest.raises(ZeroDivisionError), whole_file(file) as written:
        written.write("half" * (1 // 0))
    assert list(tmp_path.iterdir()) == []

    with whole_file(file) as written:
        written.write("all")
        assert not file.exists()

    with pytest.raises(ApplicationError, match="is there already"), whole_file(file):
        pass
    with whole_file(file, replace=True) as written:
        written.write("new")
    assert file.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["letters.jsonl"]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ApplicationError, match="cannot be written"), whole_file(tmp_path / "gone" / "file"):
        pass
