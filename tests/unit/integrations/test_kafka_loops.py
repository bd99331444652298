"""Consumer loops without a broker: keys, functions and commits."""

from __future__ import annotations

import asyncio
import functools
import re
from datetime import timedelta
from typing import Any, cast

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import RecordTooLargeError
from pydantic import ValidationError

from integr8s_idem import IdempotencyManager
from integr8s_idem.errors import ApplicationError, InvalidKeyError
from integr8s_idem.failures import FailureRule, retry, retry_later
from integr8s_idem.integrations import aiokafka, confluent
from integr8s_idem.integrations.faststream import IdempotencyMiddleware
from integr8s_idem.integrations.kafka_loops import (
    LONGEST_PAUSE,
    by_header,
    by_position,
    pause_after,
    policy_of,
    work_of,
)
from integr8s_idem.keys.fingerprints import fingerprint
from integr8s_idem.records import is_other_payload
from integr8s_idem.telemetry.log_fields import context_fields
from tests.support.fake_consumer import FakeRecord
from tests.support.guarded import guarded, plain_manager
from tests.support.versions import OrderPlaced, OrderPlacedLater


def _fingerprint(value: Any) -> bytes | None:
    record = FakeRecord("orders", 0, 7, None, value)
    return work_of(guarded().manager, record, by_position, None, _fingerprint).fingerprint


def test_the_fingerprint_covers_deserialized_bodies() -> None:
    assert _fingerprint(b"{}") == fingerprint(b"{}")
    assert _fingerprint(None) == _fingerprint(b"")
    assert _fingerprint({"order": 1}) == _fingerprint({"order": 1}) != _fingerprint({"order": 2})
    assert _fingerprint("text") is not None
    assert _fingerprint(object()) is None


def test_deserialized_events_with_another_field_are_not_compared() -> None:
    stored = _fingerprint(OrderPlaced(event_id="1"))

    assert not is_other_payload(stored, _fingerprint(OrderPlacedLater(event_id="1")))
    assert is_other_payload(stored, _fingerprint(OrderPlaced(event_id="1", order_id="2")))


def test_header_names_are_case_insensitive_and_empty_headers_are_missing() -> None:
    record = FakeRecord("orders", 1, 7, None, b"", [("Event-Id", b"e-1"), ("empty", b"")])
    assert by_header("event-id")(record) == "e-1"
    for name in ("empty", "missing"):
        with pytest.raises(InvalidKeyError, match=rf"orders\[1\]@7 has no header {name}"):
            by_header(name)(record)


def test_pauses_grow_up_to_a_maximum() -> None:
    pauses = [pause_after(failures) for failures in range(1, 200)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.2, LONGEST_PAUSE)


class FakeMessage:
    """A message of confluent-kafka."""

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

    def key(self) -> None:
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
def test_a_confluent_loop_rejects_async_functions_before_reserving(function: Any) -> None:
    manager = plain_manager()
    delivery = _in_a_thread(manager)

    with pytest.raises(ApplicationError, match=r"is an async function, .* write `def`"):
        delivery.run(function)

    assert not delivery.settled
    assert asyncio.run(manager.get("orders:0:7")) is None


def test_a_coroutine_returned_by_a_plain_function_is_closed_and_the_record_not_completed() -> None:
    manager, made = plain_manager(), list[Any]()

    def make(message: Any) -> Any:
        made.append(charge(message))
        return made[-1]

    delivery = _in_a_thread(manager)
    with pytest.raises(ApplicationError, match=r"make returned an awaitable \(coroutine\), which is not awaited here"):
        delivery.run(make)

    assert made[0].cr_frame is None  # closed
    assert not delivery.settled
    assert _in_a_thread(manager).run(charge_now) == "charged"


def test_a_stop_iteration_of_a_function_is_the_cause_of_a_runtime_error() -> None:
    delivery = _in_a_thread(plain_manager())

    with pytest.raises(RuntimeError) as raised:
        delivery.run(lambda message: next(iter(())))

    assert isinstance(raised.value.__cause__, StopIteration)
    assert not delivery.settled


@pytest.mark.parametrize(
    "function",
    [charge_now, ChargingNow().__call__, functools.partial(charge_now)],
    ids=["function", "method", "partial"],
)
async def test_an_aiokafka_loop_rejects_plain_functions_before_reserving(function: Any) -> None:
    here = guarded()
    delivery = _in_a_loop(here.manager)

    with pytest.raises(ApplicationError, match=r"is a plain function, .* write `async def`"):
        await delivery.run(function)

    assert not delivery.settled
    assert not here.store.calls["reserve"]


async def test_a_result_that_is_not_awaitable_fails_the_run() -> None:
    here = guarded()

    with pytest.raises(ApplicationError, match="returned str, which cannot be awaited: pass an async function"):
        await _in_a_loop(here.manager).run(cast("Any", ChargingNow()))

    delivery = _in_a_loop(here.manager)
    assert await delivery.run(charge) == "charged"
    assert delivery.attempt is not None
    assert delivery.attempt.number == 2
    assert await _in_a_loop(here.manager).run(lambda message: charge(message)) == "charged"


class FakeAiokafka:
    """An aiokafka consumer with one partition and scripted polls."""

    def __init__(
        self, *polls: list[FakeRecord] | Exception, position: int, partition_poll: list[FakeRecord] | Exception
    ) -> None:
        self.polls = list(polls)
        self.current_position = position
        self.partition_poll = partition_poll
        """The answer to a poll of the single partition."""
        self.commits: list[dict[Any, int]] = []

    def assignment(self) -> set[Any]:
        return {PARTITION}

    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int | None = None) -> dict[Any, Any]:
        found = self.partition_poll if partitions else self.polls.pop(0)
        if isinstance(found, Exception):
            raise found
        return {PARTITION: found} if found else {}

    async def position(self, partition: Any) -> int:
        return self.current_position

    def seek(self, partition: Any, offset: int) -> None:
        self.current_position = offset

    async def commit(self, offsets: dict[Any, int]) -> None:
        self.commits.append(dict(offsets))


PARTITION = TopicPartition("orders", 0)


class EndOfTestError(Exception):
    """Ends the loop under test."""


async def _loop_over(consumer: FakeAiokafka) -> None:
    deliveries = aiokafka.guarded(
        cast("Any", consumer), plain_manager(), key=by_position, commit_interval=timedelta(seconds=0)
    )
    async for delivery in deliveries:
        await delivery.run(charge)


@pytest.mark.parametrize(
    ("partition_poll", "committed"),
    [
        ([], 9),
        ([FakeRecord("orders", 0, 8, None, b"")], 8),
        (RecordTooLargeError(), None),
    ],
    ids=["markers only", "a record after the markers", "a batch that the client cannot read"],
)
async def test_a_loop_commits_a_position_only_if_another_poll_returns_nothing(
    partition_poll: list[FakeRecord] | Exception, committed: int | None
) -> None:
    consumer = FakeAiokafka([], EndOfTestError(), position=9, partition_poll=partition_poll)

    with pytest.raises((EndOfTestError, RecordTooLargeError)):
        await _loop_over(consumer)

    assert consumer.commits == ([] if committed is None else [{PARTITION: committed}])


def test_log_records_of_a_confluent_loop_name_their_message() -> None:
    logged = list[dict[str, object]]()
    here = plain_manager()

    _in_a_thread(here).run(lambda message: logged.append(context_fields()))
    logged.append(context_fields())

    fields, after = logged
    assert (fields["topic"], fields["partition"], fields["offset"], fields["attempt"]) == ("orders", 0, 7, 1)
    assert after == {}


@pytest.mark.parametrize(
    "rule",
    [
        retry_later(OSError, delay=60),
        retry(OSError, first_pause=1),
        retry(OSError, longest_pause=60),
        retry(OSError, jitter=False),
    ],
    ids=str,
)
async def test_a_loop_refuses_rules_with_pauses_of_their_own(rule: FailureRule) -> None:
    expected = rf"{re.escape(str(rule))} has a pause of its own"
    with pytest.raises(ApplicationError, match=expected):
        await anext(aiokafka.guarded(cast("Any", None), plain_manager(), failures=[rule]))
    with pytest.raises(ApplicationError, match=expected):
        await asyncio.to_thread(next, confluent.guarded(cast("Any", None), plain_manager(), failures=[rule]))
    with pytest.raises(ApplicationError, match=expected):
        IdempotencyMiddleware(plain_manager(), failures=[rule])


@pytest.mark.parametrize(("failures", "final"), [(None, False), ([], True)], ids=["no rules", "default rules"])
async def test_without_rules_a_loop_has_not_even_the_default_ones(
    failures: list[FailureRule] | None, final: bool
) -> None:
    here, given_up = guarded(), list[Exception]()

    async def give_up(record: Any, error: Exception) -> None:
        given_up.append(error)

    async def invalid(record: Any) -> None:
        OrderPlaced.model_validate({"order_id": []})

    record: Any = FakeRecord("orders", 0, 7, None, b"{}")
    delivery = aiokafka.Delivery(
        cast("Any", None), here.manager, record, by_position, None, give_up, policy_of(failures)
    )
    if final:
        await delivery.run(invalid)
    else:
        with pytest.raises(ValidationError):
            await delivery.run(invalid)

    assert (delivery.settled, len(given_up)) == (final, int(final))


async def test_a_consumer_that_is_not_started_is_refused() -> None:
    consumer = AIOKafkaConsumer("orders", group_id="billing", enable_auto_commit=False)

    with pytest.raises(ApplicationError, match=r"call `await consumer.start\(\)` before the loop"):
        await anext(aiokafka.guarded(consumer, plain_manager()))
    await consumer.stop()
