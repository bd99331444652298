"""Loops of one's own, without a broker: what names the work of a record, and what becomes of it."""

from __future__ import annotations

import asyncio
import functools
from datetime import timedelta
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import RecordTooLargeError

from integr8s_idem import IdempotencyManager
from integr8s_idem.errors import ApplicationError, InvalidKeyError
from integr8s_idem.integrations import aiokafka, confluent
from integr8s_idem.integrations.kafka_loops import LONGEST_PAUSE, by_header, by_position, pause_after, work_of
from integr8s_idem.keys import fingerprint
from tests.support.fake_consumer import FakeRecord
from tests.support.guarded import guarded, plain_manager


def _fingerprint(value: Any) -> bytes | None:
    record = FakeRecord("orders", 0, 7, None, value)
    return work_of(guarded().manager, record, by_position, None, _fingerprint).fingerprint


def test_the_body_is_the_payload_whatever_a_deserializer_has_made_of_it() -> None:
    assert _fingerprint(b"{}") == fingerprint(b"{}")
    assert _fingerprint(None) == _fingerprint(b"")
    assert _fingerprint({"order": 1}) == _fingerprint({"order": 1}) != _fingerprint({"order": 2})
    assert _fingerprint("text") is not None
    assert _fingerprint(object()) is None


def test_a_header_is_found_whatever_its_case_and_an_empty_one_is_none() -> None:
    record = FakeRecord("orders", 1, 7, None, b"", [("Event-Id", b"e-1"), ("empty", b"")])
    assert by_header("event-id")(record) == "e-1"
    for name in ("empty", "missing"):
        with pytest.raises(InvalidKeyError, match=rf"orders\[1\]@7 has no header {name}"):
            by_header(name)(record)


def test_pauses_grow_and_end_growing() -> None:
    pauses = [pause_after(failures) for failures in range(1, 200)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.2, LONGEST_PAUSE)


class FakeMessage:
    """As confluent-kafka gives one."""

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def value(self) -> bytes:
        return b"{}"

    def headers(self) -> None:
        return None


def _in_a_thread(here: IdempotencyManager) -> confluent.Delivery:
    return confluent.Delivery(cast("Any", None), here, cast("Any", FakeMessage()), by_position, None, None)


def _in_a_loop(here: IdempotencyManager) -> aiokafka.Delivery:
    record: Any = FakeRecord("orders", 0, 7, None, b"{}")
    return aiokafka.Delivery(cast("Any", None), here, record, by_position, None, None)


async def charge(message: Any) -> str:
    return "charged"


def charge_now(message: Any) -> str:
    return "charged"


class Charging:
    async def __call__(self, message: Any) -> str:
        return "charged"


KINDS = ["function", "object", "method", "partial"]


class ChargingNow:
    def __call__(self, message: Any) -> str:
        return "charged"


@pytest.mark.parametrize("function", [charge, Charging(), Charging().__call__, functools.partial(charge)], ids=KINDS)
def test_an_async_function_is_refused_in_a_thread_before_anything_is_reserved(function: Any) -> None:
    manager = plain_manager()
    delivery = _in_a_thread(manager)

    with pytest.raises(ApplicationError, match=r"is an async function, .* write `def`"):
        delivery.run(function)

    assert not delivery.settled
    assert asyncio.run(manager.get("orders:0:7")) is None


def test_what_a_plain_function_returns_to_await_is_closed_and_its_record_is_not_completed() -> None:
    manager, made = plain_manager(), list[Any]()

    def make(message: Any) -> Any:
        made.append(charge(message))
        return made[-1]

    delivery = _in_a_thread(manager)
    with pytest.raises(ApplicationError, match="make has returned coroutine to await, which nobody does"):
        delivery.run(make)

    assert made[0].cr_frame is None  # closed
    assert not delivery.settled
    assert _in_a_thread(manager).run(charge_now) == "charged"


@pytest.mark.parametrize(
    "function",
    [charge_now, ChargingNow().__call__, functools.partial(charge_now)],
    ids=["function", "method", "partial"],
)
async def test_a_plain_function_is_refused_in_a_loop_before_anything_is_reserved(function: Any) -> None:
    here = guarded()
    delivery = _in_a_loop(here.manager)

    with pytest.raises(ApplicationError, match=r"is a plain function, .* write `async def`"):
        await delivery.run(function)

    assert not delivery.settled
    assert not here.store.calls["reserve"]


async def test_what_cannot_be_awaited_is_a_failure_that_says_so() -> None:
    here = guarded()

    with pytest.raises(ApplicationError, match="has returned str, which cannot be awaited: give an async function"):
        await _in_a_loop(here.manager).run(cast("Any", ChargingNow()))

    delivery = _in_a_loop(here.manager)
    assert await delivery.run(charge) == "charged"
    assert delivery.attempt is not None
    assert delivery.attempt.number == 2
    assert await _in_a_loop(here.manager).run(lambda message: charge(message)) == "charged"


class FakeAiokafka:
    """One partition of aiokafka's consumer: what its polls bring, and where it goes on."""

    def __init__(
        self, *polls: list[FakeRecord] | Exception, position: int, of_one: list[FakeRecord] | Exception
    ) -> None:
        self.polls = list(polls)
        self.at = position
        self.of_one = of_one
        """What a poll of the one partition brings."""
        self.commits: list[dict[Any, int]] = []

    def assignment(self) -> set[Any]:
        return {PARTITION}

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int | None = None) -> dict[Any, Any]:
        found = self.of_one if partitions else self.polls.pop(0)
        if isinstance(found, Exception):
            raise found
        return {PARTITION: found} if found else {}

    async def position(self, partition: Any) -> int:
        return self.at

    def seek(self, partition: Any, offset: int) -> None:
        self.at = offset

    async def commit(self, offsets: dict[Any, int]) -> None:
        self.commits.append(dict(offsets))


PARTITION = TopicPartition("orders", 0)


class EndOfTestError(Exception):
    """Ends a loop."""


async def _loop_over(consumer: FakeAiokafka) -> None:
    deliveries = aiokafka.guarded(
        cast("Any", consumer), plain_manager(), key=by_position, commit_interval=timedelta(seconds=0)
    )
    async for delivery in deliveries:
        await delivery.run(charge)


@pytest.mark.parametrize(
    ("of_one", "committed"),
    [
        ([], 9),
        ([FakeRecord("orders", 0, 8, None, b"")], 8),
        (RecordTooLargeError(), None),
    ],
    ids=["markers alone", "a record behind them", "a batch that the client cannot take"],
)
async def test_a_loop_commits_a_position_only_if_a_poll_has_nothing_to_say_about_it(
    of_one: list[FakeRecord] | Exception, committed: int | None
) -> None:
    consumer = FakeAiokafka([], EndOfTestError(), position=9, of_one=of_one)

    with pytest.raises((EndOfTestError, RecordTooLargeError)):
        await _loop_over(consumer)

    assert consumer.commits == ([] if committed is None else [{PARTITION: committed}])
