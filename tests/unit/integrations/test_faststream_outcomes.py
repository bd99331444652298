"""How the FastStream middleware settles messages when something fails after the handler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError, MessageSizeTooLargeError
from faststream import AckPolicy, BaseMiddleware
from faststream.exceptions import StopApplication, StopConsume
from faststream.kafka import KafkaBroker, KafkaMessage, TestKafkaBroker
from faststream.kafka.message import KafkaAckableMessage
from faststream.message import AckStatus

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.errors import PermanentError, ServiceStoppedError
from integr8s_idem.failures import dead_letter, discard, retry, stop
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, SubscriberError
from integr8s_idem.records import Completion, IdempotencyStatus, ReserveRequest, Verdict
from tests.support.faststream_shop import Shop, nothing
from tests.support.guarded import guarded


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.faststream_guard.pause_after", lambda _: 0.0)


async def test_publishing_is_retried_without_running_the_handler_again() -> None:
    shop, refusals = Shop(max_attempts=1), [KafkaTimeoutError("no"), KafkaTimeoutError("no"), KafkaTimeoutError("no")]
    shop.add_subscriber({"receipt": "1"})

    async def publish() -> None:
        assert await shop.statuses() == [IdempotencyStatus.PROCESSING]
        if refusals:
            raise refusals.pop()

    shop.before_publishing(publish)
    async with TestKafkaBroker(shop.broker):
        await shop.place()

    assert len(shop.runs) == len(shop.sent) == 1
    assert shop.settled == ["ack"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_a_published_message_that_is_too_large_fails_the_run() -> None:
    shop = Shop(max_attempts=1)
    shop.add_subscriber({"receipt": "1"})

    async def publish() -> None:
        raise MessageSizeTooLargeError("no")

    shop.before_publishing(publish)
    async with TestKafkaBroker(shop.broker):
        await shop.place()

    assert len(shop.given_up) == 1
    assert await shop.statuses() == [IdempotencyStatus.FAILED]


async def test_publish_failures_inside_a_handler_do_not_count_as_attempts() -> None:
    shop, refusals = Shop(max_attempts=1), [KafkaTimeoutError("no"), KafkaTimeoutError("no")]

    @shop.broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(order: dict[str, str]) -> None:
        shop.runs.append(order)
        if refusals:
            raise refusals.pop()

    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker):
        for _ in range(3):
            await shop.place()

    assert len(shop.runs) == 3
    assert not shop.given_up
    assert shop.settled == ["NackMessage", "NackMessage", "ack"]


async def test_a_lease_lost_while_publishing_redelivers_the_message_and_keeps_the_subscriber() -> None:
    shop = Shop(processing_timeout_seconds=0.5)
    shop.add_subscriber({"receipt": "1"})

    async def publish() -> None:
        if len(shop.runs) == 1:
            shop.here.store.down = {"renew"}
            await asyncio.sleep(60)

    shop.before_publishing(publish)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        assert shop.settled == ["NackMessage"]
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        shop.here.store.down = set()
        await shop.place()

    assert len(shop.runs) == 2
    assert len(shop.sent) == 1
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


@pytest.mark.parametrize("batch", [False, True], ids=["one message", "a batch"])
@pytest.mark.parametrize("error", [None, PermanentError("no such card")], ids=["done", "failed"])
async def test_a_lease_that_expires_as_the_handler_returns_does_not_cancel_the_subscriber(
    error: Exception | None, batch: bool
) -> None:
    lease = 0.5
    shop = Shop(processing_timeout_seconds=lease)

    async def charge(order: Any) -> None:
        shop.runs.append(order)
        # The process pauses one loop iteration before the handler returns, so the lease timer fires right after it.
        loop = asyncio.get_running_loop()
        wake = loop.create_future()
        loop.call_soon(wake.set_result, None)
        loop.call_soon(time.sleep, 1.5 * lease)
        await wake
        if error is not None:
            raise error

    shop.broker.subscriber("orders", group_id="billing", batch=batch, ack_policy=AckPolicy.NACK_ON_ERROR)(charge)
    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    # No other process has taken the key, so the outcome in the store counts.
    assert len(shop.runs) == 1
    assert await shop.statuses() == [IdempotencyStatus.FAILED if error else IdempotencyStatus.COMPLETED]
    assert bool(shop.given_up) == (error is not None)


async def test_duplicates_in_one_batch_are_handled_once_without_waiting_for_each_other() -> None:
    shop, batches = Shop(), list[list[str]]()

    @shop.broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(orders: list[dict[str, str]]) -> None:
        batches.append([order["order"] for order in orders])

    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker), asyncio.timeout(20):
        # All messages of a producer's batch have the same headers.
        await shop.broker.publish_batch({"order": "1"}, {"order": "1"}, topic="orders", headers={"event_id": "e-1"})

    assert batches == [["1"]]
    assert shop.settled == ["ack"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_the_message_that_a_handler_of_batches_gets_contains_only_the_new_records() -> None:
    here, got = guarded(), list[Any]()
    guard = IdempotencyMiddleware(here.manager, key=lambda record: str(record.value.decode()))
    broker = KafkaBroker(middlewares=[guard])

    @broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(orders: list[str], message: KafkaMessage) -> None:
        records: Any = message.raw_message
        got.append(
            (orders, [record.value.decode() for record in records], len(message.batch_headers), message.headers["n"])
        )

    class Number(BaseMiddleware[Any, Any]):
        async def on_receive(self) -> None:
            for record in self.msg:
                record.headers = (*record.headers, ("n", record.value))

    broker.insert_middleware(Number)
    async with TestKafkaBroker(broker):
        await broker.publish_batch("7", topic="orders")
        await broker.publish_batch("7", "8", "9", topic="orders")
    assert got == [(["7"], ["7"], 1, "7"), (["8", "9"], ["8", "9"], 2, "8")]


async def test_an_event_id_reused_within_a_batch_is_given_up() -> None:
    shop, batches = Shop(), list[list[str]]()

    @shop.broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(orders: list[dict[str, str]]) -> None:
        batches.append([order["order"] for order in orders])

    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker), asyncio.timeout(20):
        await shop.broker.publish_batch({"order": "1"}, {"order": "2"}, topic="orders", headers={"event_id": "e-1"})

    assert batches == [["1"]]
    assert "KeyReusedError" in shop.given_up[0]
    assert shop.settled == ["ack"]


@pytest.mark.parametrize("policy", [AckPolicy.ACK, AckPolicy.NACK_ON_ERROR])
async def test_without_given_up_a_failed_message_is_redelivered_and_logs_the_remedy(
    policy: AckPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(accepts_given_up=False)
    shop.add_failing_subscriber(policy=policy)
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage"] * 2
    first, second = _errors(caplog)
    assert "no such card" in first
    assert "was given up after attempt 1: PermanentError: no such card" in second
    assert "pass IdempotencyMiddleware(given_up=…)" in first
    assert "pass IdempotencyMiddleware(given_up=…)" in second


def _errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = (record for record in caplog.records if record.name == "integr8s_idem.integrations.faststream_guard")
    return [record.getMessage() for record in records if record.levelno == logging.ERROR]


async def test_without_given_up_messages_with_a_missing_or_reused_key_are_redelivered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Shop(accepts_given_up=False)
    shop.add_subscriber(None)
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.broker.publish({"order": "7"}, "orders")
        await shop.place()
        await shop.place(order="8")

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage", "ack", "NackMessage"]
    nameless, reused = _errors(caplog)
    assert "has no header event_id to make a key of. Read more" in nameless
    assert "Give each payload its own id" in reused  # the message, not the `repr`


async def test_without_given_up_a_batch_with_a_failed_message_is_redelivered_and_the_rest_is_handled() -> None:
    shop, batches = Shop(accepts_given_up=False), list[list[str]]()

    @shop.broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.ACK)
    async def charge(orders: list[dict[str, str]]) -> None:
        batches.append([order["order"] for order in orders])

    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker), asyncio.timeout(20):
        for _ in range(2):  # the second body reuses the event id
            await shop.broker.publish_batch({"order": "1"}, {"order": "2"}, topic="orders", headers={"event_id": "e-1"})

    assert batches == [["1"]]
    assert shop.settled == ["NackMessage"] * 2
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_without_given_up_a_batch_whose_run_is_given_up_is_redelivered() -> None:
    shop = Shop(accepts_given_up=False)
    shop.add_failing_subscriber(policy=AckPolicy.ACK, batch=True)
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        for _ in range(2):
            await shop.broker.publish_batch({"order": "1"}, topic="orders", headers={"event_id": "e-1"})

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage"] * 2


async def test_a_message_is_redelivered_until_given_up_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.add_failing_subscriber(policy=AckPolicy.ACK)
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        shop.given_up_error = OSError("no topic")
        await shop.place()
        await shop.place()
        shop.given_up_error = None
        await shop.place()

    assert shop.settled == ["NackMessage", "NackMessage", "AckMessage"]
    assert len(shop.given_up) == 1
    assert "given_up raised: OSError('no topic')" in _errors(caplog)[1]


async def test_a_failing_key_function_redelivers_the_message_under_any_policy() -> None:
    shop, failing = Shop(), [KeyError("tenant")]

    def key(record: Any) -> str:
        if failing:
            raise failing.pop()
        return "key"

    shop.guard = IdempotencyMiddleware(shop.here.manager, key=key)
    shop.broker = KafkaBroker(middlewares=[shop.guard])

    @shop.broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.ACK)
    async def charge(order: Any) -> None:
        shop.runs.append(order)

    shop.before_publishing(nothing)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage", "ack"]


class RemoteStore(MemoryIdempotencyRepository):
    """A store whose answers take a while, so that the reservations of two clients interleave."""

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        await asyncio.sleep(0.002)
        return await super().reserve(requests)


async def test_batches_with_the_same_messages_in_another_order_do_not_wait_for_each_other() -> None:
    store, handled = RemoteStore(), list[str]()

    def instance() -> KafkaBroker:
        guard = IdempotencyMiddleware(IdempotencyManager(repository=store, scope="billing"), key=body_of)
        broker = KafkaBroker(middlewares=[guard])

        @broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
        async def charge(batch: list[str]) -> None:
            handled.extend(batch)

        return broker

    def body_of(record: Any) -> str:
        return str(record.value.decode())

    one, other, orders = instance(), instance(), [f"order-{number}" for number in range(20)]
    async with TestKafkaBroker(one), TestKafkaBroker(other), asyncio.timeout(20):
        await asyncio.gather(
            one.publish_batch(*orders, topic="orders"), other.publish_batch(*reversed(orders), topic="orders")
        )

    assert sorted(handled) == sorted(orders)


async def test_the_records_of_a_batch_are_completed_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    store, sizes, orders = RemoteStore(), list[int](), [f"order-{number}" for number in range(20)]
    complete = store.complete

    async def counted(completions: Sequence[Completion]) -> list[bool]:
        sizes.append(len(completions))
        return await complete(completions)

    monkeypatch.setattr(store, "complete", counted)
    guard = IdempotencyMiddleware(
        IdempotencyManager(repository=store, scope="billing"), key=lambda record: str(record.value.decode())
    )
    broker = KafkaBroker(middlewares=[guard])

    @broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(batch: list[str]) -> None:
        pass

    async with TestKafkaBroker(broker):
        await broker.publish_batch(*orders, topic="orders")

    assert sizes == [20]


async def test_a_rule_discards_a_message(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop(failures=[discard(KeyError)])
    shop.add_failing_subscriber(error=KeyError("withdrawn"))
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == 1
    assert shop.settled == ["AckMessage", "AckMessage"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]
    assert shop.given_up == []
    assert "failed at attempt 1 (KeyError: 'withdrawn'), discarded by a rule" in caplog.text


async def test_a_rule_gives_up_a_message_at_once_and_another_one_later() -> None:
    shop = Shop(failures=[dead_letter(ValueError), retry(OSError, attempts=3)], max_attempts=2)
    shop.add_failing_subscriber(error=ValueError("invalid"))
    shop.before_publishing(nothing)
    patient = Shop(failures=[dead_letter(ValueError), retry(OSError, attempts=3)], max_attempts=2)
    patient.add_failing_subscriber(error=OSError("busy"))
    patient.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker), TestKafkaBroker(patient.broker):
        await shop.place()
        for _ in range(3):
            await patient.place()

    assert (shop.settled, shop.given_up) == (["AckMessage"], ["ValueError('invalid')"])
    assert patient.settled == ["NackMessage", "NackMessage", "AckMessage"]
    assert patient.given_up == ["OSError('busy')"]


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.ACK])
async def test_a_rule_stops_a_subscriber_and_its_message_is_not_acknowledged(
    policy: AckPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rejected, acknowledged = list[str](), list[str]()
    original_nack, original_ack = KafkaAckableMessage.nack, KafkaAckableMessage.ack

    async def nack(message: Any) -> None:
        rejected.append(message.headers["event_id"])
        await original_nack(message)

    async def ack(message: Any) -> None:
        if not message.committed:
            acknowledged.append(message.headers["event_id"])
        await original_ack(message)

    monkeypatch.setattr(KafkaAckableMessage, "nack", nack)
    monkeypatch.setattr(KafkaAckableMessage, "ack", ack)
    shop = Shop(failures=[stop(ArithmeticError)], max_attempts=1)
    shop.add_failing_subscriber(policy=policy, error=ArithmeticError("a sum does not match"))
    shop.before_publishing(nothing)

    async with TestKafkaBroker(shop.broker):
        with pytest.raises(ServiceStoppedError, match=r"The rule stop\(ArithmeticError\) stops"):
            await shop.place()

    assert (set(rejected), acknowledged) == ({"e-1"}, [])
    assert shop.settled == ["SubscriberStoppedError"]
    assert await shop.statuses() == [IdempotencyStatus.PROCESSING]
    assert shop.given_up == []


@pytest.mark.parametrize("policy", [AckPolicy.NACK_ON_ERROR, AckPolicy.ACK])
@pytest.mark.parametrize("error", [StopConsume(), StopApplication(), SystemExit(0), KeyboardInterrupt()])
async def test_a_handler_may_stop_its_subscriber_and_its_message_is_not_acknowledged(
    policy: AckPolicy, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = list[str]()

    async def nack(message: Any) -> None:
        settled.append("nack")
        message.committed = AckStatus.NACKED

    async def ack(message: Any) -> None:
        if not message.committed:
            settled.append("ack")

    monkeypatch.setattr(KafkaAckableMessage, "nack", nack)
    monkeypatch.setattr(KafkaAckableMessage, "ack", ack)
    shop = Shop(max_attempts=1)
    shop.add_failing_subscriber(policy=policy, error=error)

    async with TestKafkaBroker(shop.broker):
        with pytest.raises(type(error)):
            await shop.place()

    assert set(settled) == {"nack"}
    assert shop.given_up == []
    await shop.here.manager.close()
    assert await shop.here.store.count_active("") == 0


async def test_rules_do_not_apply_to_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rejected = list[Any]()

    async def nack(message: Any) -> None:
        rejected.append(message)

    monkeypatch.setattr(KafkaAckableMessage, "nack", nack)
    shop = Shop(failures=[discard(KeyError)])
    shop.add_failing_subscriber(batch=True)

    with pytest.raises(SubscriberError, match="do not apply to batches"):
        shop.guard.check(shop.broker)
    async with TestKafkaBroker(shop.broker):
        with pytest.raises(SubscriberError, match="do not apply to batches"):
            await shop.place()
    assert shop.runs == []
    assert rejected
