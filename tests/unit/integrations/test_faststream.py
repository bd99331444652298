"""The FastStream middleware handles each message once; tested on FastStream's in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
from dishka import Provider, Scope, make_async_container, provide
from dishka_faststream import FromDishka, inject, setup_dishka
from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker, KafkaMessage, KafkaResponse, TestKafkaBroker
from faststream.message import AckStatus
from pydantic import BaseModel

from integr8s_idem import IdempotencyManager
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, SubscriberError, by_header
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.telemetry.log_fields import context_fields
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.guarded import guarded


class Order(BaseModel):
    order_id: str


class Receipt(BaseModel):
    number: int


class Shop:
    """A broker with guarded subscribers, and the recorded effects."""

    def __init__(self, **config: Any) -> None:
        self.here = guarded(**config)
        self.given_up: list[str] = []
        self.guard = IdempotencyMiddleware(self.here.manager, key=by_header("event_id"), given_up=self._give_up)
        self.broker = KafkaBroker(middlewares=[self.guard])
        self.charged: list[str] = []

    async def _give_up(self, record: Any, error: Exception) -> None:
        self.given_up.append(str(error))

    @property
    def store(self) -> FlakyStore:
        return self.here.store

    @property
    def manager(self) -> IdempotencyManager:
        return self.here.manager

    async def place(self, order_id: str = "7", event_id: str = "e-1") -> None:
        await self.broker.publish(Order(order_id=order_id), "orders", headers={"event_id": event_id})

    async def statuses(self) -> list[IdempotencyStatus]:
        return [record.status async for record in self.store.scan("")]


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.faststream_guard.pause_after", lambda _: 0.0)


class Transaction:
    """A resource that its provider commits when the scope closes."""


def _guarded(shop: Shop, topic: str = "orders", **options: Any) -> Callable[[Any], Any]:
    subscriber: Callable[[Any], Any] = shop.broker.subscriber(
        topic, **{"group_id": "billing", "ack_policy": AckPolicy.NACK_ON_ERROR, **options}
    )
    return subscriber


async def test_a_duplicate_does_not_reach_the_handler_and_its_result_is_published_again() -> None:
    shop, receipts = Shop(), list[tuple[int, str]]()

    @_guarded(shop)
    @shop.broker.publisher("receipts")
    async def charge(order: Order) -> Receipt:
        shop.charged.append(order.order_id)
        return Receipt(number=len(shop.charged))

    @_guarded(shop, "receipts")
    async def receive(receipt: Receipt, message: KafkaMessage) -> None:
        receipts.append((receipt.number, message.headers["event_id"]))

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()
        await shop.place("8", "e-2")

    assert shop.charged == ["7", "8"]
    # The second publication has the event id of the first, so the next subscriber treats it as a duplicate.
    assert [number for number, _ in receipts] == [1, 2]
    assert len({event_id for _, event_id in receipts}) == 2
    assert set(await shop.statuses()) == {IdempotencyStatus.COMPLETED}


async def test_a_duplicate_publishes_the_result_of_the_first_run() -> None:
    shop, sent = Shop(), list[tuple[Any, Any]]()

    @_guarded(shop)
    @shop.broker.publisher("receipts")
    async def charge(order: Order) -> KafkaResponse:
        return KafkaResponse(Receipt(number=1), headers={"kind": "receipt"})

    async def publish_scope(call_next: Any, cmd: Any) -> Any:
        sent.append((cmd.body, dict(cmd.headers)))
        return await call_next(cmd)

    shop.broker.add_middleware(_publishing(publish_scope))
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    answers = [
        (body if isinstance(body, dict) else body.model_dump(), headers) for body, headers in sent if "kind" in headers
    ]
    assert len(answers) == 2
    assert answers[0][0] == answers[1][0] == {"number": 1}
    assert answers[0][1]["event_id"] == answers[1][1]["event_id"]


@pytest.mark.parametrize("answer", [lambda value: value, KafkaResponse])
async def test_an_iterator_is_published_as_the_list_that_a_duplicate_publishes_again(answer: Any) -> None:
    shop, sent = Shop(), list[Any]()

    @_guarded(shop)
    @shop.broker.publisher("receipts")
    async def charge(order: Order) -> Any:
        shop.charged.append(order.order_id)
        return answer(number for number in (1, 2))

    async def publish_scope(call_next: Any, cmd: Any) -> Any:
        if cmd.destination == "receipts":
            sent.append(cmd.body)
        return await call_next(cmd)

    shop.broker.add_middleware(_publishing(publish_scope))
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert shop.charged == ["7"]
    assert sent == [[1, 2], [1, 2]]


async def test_a_subscriber_that_returns_an_async_iterator_fails() -> None:
    shop = Shop(max_attempts=2)

    async def pages() -> AsyncIterator[int]:
        yield 1

    @_guarded(shop)
    async def charge(order: Order) -> Any:
        shop.charged.append(order.order_id)
        return pages()

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert shop.charged == ["7", "7"]
    assert ["charge returned an async iterator" in error for error in shop.given_up] == [True]


def _publishing(scope: Any) -> Any:
    class Watch(BaseMiddleware[Any, Any]):
        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            return await scope(call_next, cmd)

    return Watch


async def test_the_record_is_completed_after_the_scope_closes_and_the_answer_is_published() -> None:
    shop, order = Shop(), list[str]()

    class TransactionProvider(Provider):
        @provide(scope=Scope.REQUEST)
        async def transaction(self) -> AsyncIterator[Transaction]:
            yield Transaction()
            order.append(f"commit, {len(await shop.statuses())} record {(await shop.statuses())[0].value}")

    @_guarded(shop)
    @shop.broker.publisher("receipts")
    @inject
    async def charge(message: Order, transaction: FromDishka[Transaction]) -> dict[str, int]:
        return {"number": 1}

    async def publish_scope(call_next: Any, cmd: Any) -> Any:
        if shop.store.calls["reserve"]:
            order.append(f"publish, {(await shop.statuses())[0].value}")
        return await call_next(cmd)

    container = make_async_container(TransactionProvider())
    setup_dishka(container, broker=shop.broker)
    shop.broker.add_middleware(_publishing(publish_scope))
    async with TestKafkaBroker(shop.broker):
        await shop.place()
    await container.close()

    assert order == ["commit, 1 record processing", "publish, processing"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


@pytest.mark.parametrize("failing_stage", ["handler", "commit", "publish"])
async def test_a_failure_before_the_record_is_completed_redelivers_the_message(failing_stage: str) -> None:
    shop, fails = Shop(), [OSError("once")]

    def fail_at(stage: str) -> None:
        if stage == failing_stage and fails:
            raise fails.pop()

    class TransactionProvider(Provider):
        @provide(scope=Scope.REQUEST)
        async def transaction(self) -> AsyncIterator[Transaction]:
            yield Transaction()
            fail_at("commit")

    @_guarded(shop)
    @shop.broker.publisher("receipts")
    @inject
    async def charge(message: Order, transaction: FromDishka[Transaction]) -> dict[str, int]:
        shop.charged.append(message.order_id)
        fail_at("handler")
        return {"number": 1}

    async def publish_scope(call_next: Any, cmd: Any) -> Any:
        if shop.charged:
            fail_at("publish")
        return await call_next(cmd)

    container = make_async_container(TransactionProvider())
    setup_dishka(container, broker=shop.broker)
    shop.broker.add_middleware(_publishing(publish_scope))
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        assert await shop.statuses() == [IdempotencyStatus.PROCESSING]
        await shop.place()
    await container.close()
    assert shop.charged == ["7", "7"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_a_message_that_is_given_up_is_acknowledged_and_passed_to_given_up() -> None:
    shop = Shop(max_attempts=2)

    @_guarded(shop)
    async def charge(order: Order) -> None:
        shop.charged.append(order.order_id)
        raise OSError("no")

    async with TestKafkaBroker(shop.broker):
        for _ in range(4):
            await shop.place()
    assert shop.charged == ["7", "7"]
    assert shop.given_up[0] == "no"
    assert len(shop.given_up) == 3


async def test_no_message_is_handled_while_the_store_is_down() -> None:
    shop = Shop()

    @_guarded(shop)
    async def charge(order: Order) -> None:
        shop.charged.append(order.order_id)

    shop.store.down = {"reserve"}
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        assert not shop.charged
        shop.store.down = set()
        await shop.place()
    assert shop.charged == ["7"]


async def test_a_reused_event_id_with_another_payload_is_given_up() -> None:
    shop = Shop()

    @_guarded(shop)
    async def charge(order: Order) -> None:
        shop.charged.append(order.order_id)

    async with TestKafkaBroker(shop.broker):
        await shop.place("7")
        await shop.place("8")
    assert shop.charged == ["7"]
    assert "was used" in shop.given_up[0] or "another payload" in shop.given_up[0]


@pytest.mark.parametrize("policy", [AckPolicy.ACK_FIRST, AckPolicy.MANUAL])
async def test_an_ack_policy_that_loses_messages_is_rejected(policy: AckPolicy) -> None:
    shop = Shop()

    @_guarded(shop, ack_policy=policy)
    async def charge(order: Order) -> None:
        shop.charged.append(order.order_id)

    with pytest.raises(
        SubscriberError, match=f"AckPolicy.{policy.name} acknowledges .* set ack_policy=AckPolicy.NACK_ON"
    ):
        shop.guard.check(shop.broker)
    async with TestKafkaBroker(shop.broker):
        with pytest.raises(SubscriberError):
            await shop.place()
    assert not shop.charged


async def test_the_default_ack_policy_is_rejected_and_others_are_accepted() -> None:
    shop = Shop()
    shop.broker.subscriber("orders", group_id="billing")(lambda message: None)
    with pytest.raises(SubscriberError, match="ACK_FIRST"):
        shop.guard.check(shop.broker)
    good = Shop()
    for policy in (AckPolicy.ACK, AckPolicy.NACK_ON_ERROR):
        _guarded(good, policy.name, ack_policy=policy, title=policy.name)(lambda message: None)
    good.guard.check(good.broker)


async def test_subscribers_without_a_group_are_not_guarded() -> None:
    shop = Shop()

    @shop.broker.subscriber("orders")
    async def watch(order: Order) -> None:
        shop.charged.append(order.order_id)

    shop.guard.check(shop.broker)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()
    assert shop.charged == ["7", "7"]
    assert not shop.store.calls["reserve"]


async def test_the_handler_receives_only_the_new_records_of_a_batch() -> None:
    shop, batches = Shop(), list[list[str]]()

    @shop.broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(orders: list[Order]) -> None:
        batches.append([order.order_id for order in orders])

    async with TestKafkaBroker(shop.broker):
        await shop.broker.publish_batch(Order(order_id="1"), topic="orders", headers={"event_id": "e-1"})
        await shop.broker.publish_batch(Order(order_id="1"), topic="orders", headers={"event_id": "e-1"})
    assert batches == [["1"]]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_a_handler_may_have_steps() -> None:
    shop, done, fails = Shop(), list[str](), [OSError("once")]

    async def step() -> str:
        done.append("step")
        return "x"

    @_guarded(shop)
    async def charge(order: Order) -> None:
        await shop.manager.steps().run("one", step)
        if fails:
            raise fails.pop()

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()
    assert done == ["step"]


async def test_a_handler_that_lost_its_lease_is_stopped_and_its_message_redelivered() -> None:
    shop = Shop(processing_timeout_seconds=0.5)
    stopped = list[str]()

    @_guarded(shop)
    async def charge(order: Order) -> None:
        shop.charged.append(order.order_id)
        if len(shop.charged) == 1:
            shop.store.down = {"renew"}
            try:
                await asyncio.sleep(60)
            finally:
                stopped.append("stopped")

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        assert stopped == ["stopped"]
        shop.store.down = set()
        await shop.place()
    assert shop.charged == ["7", "7"]


async def test_a_duplicate_without_a_stored_result_is_acknowledged_and_not_run() -> None:
    shop, statuses = Shop(max_result_size_bytes=10), list[Any]()

    class Watch(BaseMiddleware[Any, Any]):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            statuses.append(msg)
            return await call_next(msg)

    shop.broker = KafkaBroker(middlewares=[Watch, shop.guard])

    @_guarded(shop)
    async def charge(order: Order, message: KafkaMessage) -> str:
        shop.charged.append(order.order_id)
        return "x" * 100

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()
    assert shop.charged == ["7"]
    assert [message.committed for message in statuses] == [AckStatus.ACKED] * 2
    assert not shop.given_up


async def test_a_handler_that_ignores_cancellation_does_not_cancel_its_consumer() -> None:
    shop = Shop(processing_timeout_seconds=0.5)

    @_guarded(shop)
    async def charge(order: Order) -> None:
        shop.charged.append(order.order_id)
        if len(shop.charged) == 1:
            shop.store.down = {"renew"}
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    this = asyncio.current_task()
    assert this is not None
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        assert this.cancelling() == 0
        shop.store.down = set()
        await shop.place()
    assert shop.charged == ["7", "7"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


@pytest.mark.parametrize("groups", [("billing", "billing"), ("billing", "shipping")])
async def test_subscribers_whose_functions_share_a_name_do_not_share_keys(
    groups: tuple[str, str],
) -> None:
    shop, titles = Shop(), {"orders": "order", "payments": "payment"}

    def subscribe(topic: str, group: str) -> None:
        options = {"title": titles[topic]} if len(set(groups)) == 1 else {}

        @_guarded(shop, topic, group_id=group, **options)
        async def handle(order: Order) -> None:
            shop.charged.append(topic)

    for topic, group in zip(titles, groups, strict=True):
        subscribe(topic, group)
    shop.guard.check(shop.broker)
    async with TestKafkaBroker(shop.broker):
        for topic in (*titles, *titles):
            await shop.broker.publish(Order(order_id="7"), topic, headers={"event_id": "1"})

    assert shop.charged == ["orders", "payments"]
    assert not shop.given_up


@pytest.mark.parametrize("policy", [AckPolicy.ACK, AckPolicy.NACK_ON_ERROR])
async def test_two_subscribers_with_one_name_in_a_group_are_rejected(
    policy: AckPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    shop, seen = Shop(), list[Any]()
    for topic in ("orders", "payments"):

        @_guarded(shop, topic, ack_policy=policy)
        async def handle(order: Order) -> None:
            shop.charged.append(order.order_id)

    class Watch(BaseMiddleware[Any, Any]):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.append(msg)
            return await call_next(msg)

    shop.broker.insert_middleware(Watch)
    with pytest.raises(
        SubscriberError, match=r"billing has 2 subscribers named handle; .* Give each subscriber its own title"
    ):
        shop.guard.check(shop.broker)
    async with TestKafkaBroker(shop.broker):
        with pytest.raises(SubscriberError):
            await shop.place()
    assert not shop.charged
    assert [message.committed for message in seen] == [AckStatus.NACKED]
    assert "Give each subscriber its own title" in caplog.text


async def test_a_subscriber_with_the_name_of_one_of_another_broker_is_rejected() -> None:
    shop, charged = Shop(), list[str]()
    others = [KafkaBroker(middlewares=[shop.guard]) for _ in range(2)]
    for broker in others:

        @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
        async def charge(order: Order) -> None:
            charged.append(order.order_id)

        shop.guard.check(broker)
    one, other = others
    async with TestKafkaBroker(one), TestKafkaBroker(other):
        await one.publish(Order(order_id="7"), "orders", headers={"event_id": "e-1"})
        with pytest.raises(SubscriberError, match="billing has 2 subscribers named charge"):
            await other.publish(Order(order_id="8"), "orders", headers={"event_id": "e-1"})
    async with TestKafkaBroker(other):  # the first one has stopped
        await other.publish(Order(order_id="9"), "orders", headers={"event_id": "e-2"})
    assert charged == ["7", "9"]


async def test_a_subscriber_of_two_topics_detects_duplicates_across_them() -> None:
    shop = Shop()

    @shop.broker.subscriber("orders", "orders.retry", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(order: Order) -> None:
        shop.charged.append(order.order_id)

    async with TestKafkaBroker(shop.broker):
        for topic in ("orders", "orders.retry"):
            await shop.broker.publish(Order(order_id="7"), topic, headers={"event_id": "1"})
    assert shop.charged == ["7"]


async def test_a_subscriber_without_a_stable_name_needs_a_title() -> None:
    def nameless(title: str | None) -> Shop:
        shop = Shop()
        _guarded(shop, title=title)(lambda message: None)
        return shop

    def with_two(title: str | None) -> Shop:
        shop = Shop()
        subscriber = _guarded(shop, title=title)
        one: Any = subscriber(filter=lambda message: message.content_type == "one")  # type: ignore[call-arg]
        one(_charge)
        subscriber(_refund)
        return shop

    for make in (nameless, with_two):
        shop = make(None)
        with pytest.raises(
            SubscriberError, match=r"no stable name for its keys: its functions are (<lambda>|_charge, _refund)"
        ):
            shop.guard.check(shop.broker)
        shop = make("charge")
        shop.guard.check(shop.broker)


async def _charge(order: Order) -> None: ...


async def _refund(order: Order) -> None: ...


async def test_the_key_contains_the_group_and_the_subscriber_title() -> None:
    shop = Shop()
    _guarded(shop)(_charge)
    _guarded(shop, "refunds", title="refund order")(_refund)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.broker.publish(Order(order_id="7"), "refunds", headers={"event_id": "e-1"})

    keys = [record.key async for record in shop.store.scan("")]
    assert {key.partition(":faststream:")[2] for key in keys} == {"billing:_charge:e-1", "billing:refund%20order:e-1"}


async def test_log_records_of_a_subscriber_name_its_message() -> None:
    shop, logged = Shop(), list[dict[str, object]]()

    @_guarded(shop)
    async def charge(order: Order) -> None:
        logged.append(context_fields())

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        logged.append(context_fields())

    fields, after = logged
    assert {name: fields.get(name) for name in ("service", "topic", "event_id", "handler", "attempt")} == {
        "service": "billing",
        "topic": "orders",
        "event_id": "e-1",
        "handler": "charge",
        "attempt": 1,
    }
    assert after == {}
