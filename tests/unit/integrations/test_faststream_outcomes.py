"""What becomes of FastStream's messages when something fails behind their handler; on its test broker, no Kafka."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiokafka.errors import KafkaTimeoutError, MessageSizeTooLargeError
from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker, KafkaMessage, TestKafkaBroker

from integr8s_idem.errors import PermanentError
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, by_header
from integr8s_idem.keys import Key
from integr8s_idem.records import IdempotencyStatus, Reserved, StoredResult
from tests.support.guarded import Guarded, guarded


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.integrations.faststream.pause_after", lambda _: 0.0)


class Shop:
    """One guarded subscriber, and what it publishes."""

    def __init__(self, *, takes_given_up: bool = True, **config: Any) -> None:
        self.here: Guarded = guarded(**config)
        self.given_up: list[str] = []
        self.runs: list[Any] = []
        self.sent: list[tuple[Any, dict[str, str]]] = []
        self.settled: list[str] = []
        """How FastStream was told to acknowledge the orders: by an error that says so, or by none."""
        self.guard = IdempotencyMiddleware(
            self.here.manager, key=by_header("event_id"), given_up=self._give_up if takes_given_up else None
        )
        self.cannot_take: Exception | None = None
        self.broker = KafkaBroker(middlewares=[self.guard])

    async def _give_up(self, record: Any, error: Exception) -> None:
        if self.cannot_take is not None:
            raise self.cannot_take
        self.given_up.append(repr(error))

    def sells(self, answer: Any, *, batch: bool = False) -> None:
        """It answers every order with `answer`."""

        async def charge(order: dict[str, str]) -> Any:
            self.runs.append(order)
            return answer

        publisher: Any = self.broker.publisher("receipts", batch=batch)
        self.broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)(publisher(charge))

    def publishes(self, publish: Callable[[], Awaitable[None]]) -> None:
        """`publish` is awaited before anything is sent but the order itself."""
        shop = self

        class Within(BaseMiddleware[Any, Any]):
            async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
                if cmd.destination == "receipts":
                    await publish()
                    shop.sent.append((cmd.body, dict(cmd.headers)))
                return await call_next(cmd)

        class Outside(BaseMiddleware[Any, Any]):
            async def after_processed(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> bool:
                if getattr(self.msg, "topic", "orders") == "orders":
                    shop.settled.append("ack" if exc_type is None else exc_type.__name__)
                return False

        self.broker.insert_middleware(Outside)
        self.broker.add_middleware(Within)

    def fails(self, *, policy: AckPolicy = AckPolicy.NACK_ON_ERROR, batch: bool = False) -> None:
        """It cannot do any order."""

        async def charge(order: Any) -> None:
            self.runs.append(order)
            raise PermanentError("no such card")

        self.broker.subscriber("orders", group_id="billing", ack_policy=policy, batch=batch)(charge)

    async def place(self, event_id: str = "e-1", order: str = "7") -> None:
        await self.broker.publish({"order": order}, "orders", headers={"event_id": event_id})

    async def statuses(self) -> list[IdempotencyStatus]:
        return [record.status async for record in self.here.store.scan("")]


async def _nothing() -> None:
    pass


async def test_a_duplicate_whose_result_was_too_large_to_keep_is_acknowledged() -> None:
    shop = Shop(max_result_size_bytes=10)
    shop.sells({"receipt": "x" * 100})
    shop.publishes(_nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == len(shop.sent) == 1
    assert shop.settled == ["ack", "AckMessage"]


async def test_where_results_are_not_kept_a_duplicate_publishes_nothing() -> None:
    shop = Shop(enable_result_caching=False)
    shop.sells({"receipt": "1"})
    shop.publishes(_nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert [body for body, _ in shop.sent] == [{"receipt": "1"}]
    assert shop.settled == ["ack", "AckMessage"]


async def test_a_duplicate_whose_result_cannot_be_read_is_acknowledged() -> None:
    shop = Shop()
    shop.sells({"receipt": "1"})
    shop.publishes(_nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        (record,) = [record async for record in shop.here.store.scan("")]
        await shop.here.store.delete([record.key])
        space, key = shop.here.manager.space, Key(record.key.removeprefix(shop.here.manager.space.root), "")
        assert space.full(key) == record.key
        reserved = await shop.here.manager.reserve(key)
        assert isinstance(reserved, Reserved)
        await shop.here.manager.complete(reserved, StoredResult(b"{", "application/json"))
        await shop.place()

    assert len(shop.sent) == 1
    assert shop.settled == ["ack", "AckMessage"]


async def test_messages_that_are_published_as_one_batch_do_not_share_an_id() -> None:
    shop = Shop()
    shop.sells([{"receipt": "1"}, {"receipt": "2"}], batch=True)
    received = list[tuple[str, str | None]]()

    @shop.broker.subscriber("receipts")
    async def receive(receipt: dict[str, str], message: KafkaMessage) -> None:
        received.append((receipt["receipt"], message.headers.get("event_id")))

    async with TestKafkaBroker(shop.broker):
        await shop.place()

    assert received == [("1", None), ("2", None)]


async def test_a_broker_that_takes_no_answer_is_asked_until_it_does_and_the_handler_is_not_run_again() -> None:
    shop, refusals = Shop(max_attempts=1), [KafkaTimeoutError("no"), KafkaTimeoutError("no"), KafkaTimeoutError("no")]
    shop.sells({"receipt": "1"})

    async def publish() -> None:
        assert await shop.statuses() == [IdempotencyStatus.PROCESSING]
        if refusals:
            raise refusals.pop()

    shop.publishes(publish)
    async with TestKafkaBroker(shop.broker):
        await shop.place()

    assert len(shop.runs) == len(shop.sent) == 1
    assert shop.settled == ["ack"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_an_answer_that_is_too_large_is_a_failure_of_the_handler() -> None:
    shop = Shop(max_attempts=1)
    shop.sells({"receipt": "1"})

    async def publish() -> None:
        raise MessageSizeTooLargeError("no")

    shop.publishes(publish)
    async with TestKafkaBroker(shop.broker):
        await shop.place()

    assert len(shop.given_up) == 1
    assert await shop.statuses() == [IdempotencyStatus.FAILED]


async def test_a_handler_that_cannot_publish_is_not_given_up_for_it() -> None:
    shop, refusals = Shop(max_attempts=1), [KafkaTimeoutError("no"), KafkaTimeoutError("no")]

    @shop.broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(order: dict[str, str]) -> None:
        shop.runs.append(order)
        if refusals:
            raise refusals.pop()

    shop.publishes(_nothing)
    async with TestKafkaBroker(shop.broker):
        for _ in range(3):
            await shop.place()

    assert len(shop.runs) == 3
    assert not shop.given_up
    assert shop.settled == ["NackMessage", "NackMessage", "ack"]


async def test_a_lease_that_is_lost_behind_the_handler_lets_the_message_come_again_and_the_subscriber_go_on() -> None:
    shop = Shop(processing_timeout_seconds=0.5)
    shop.sells({"receipt": "1"})

    async def publish() -> None:
        if len(shop.runs) == 1:
            shop.here.store.down = {"renew"}
            await asyncio.sleep(60)

    shop.publishes(publish)
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
async def test_a_lease_that_ends_as_its_handler_returns_does_not_cancel_the_subscriber(
    error: Exception | None, batch: bool
) -> None:
    lease = 0.5
    shop = Shop(processing_timeout_seconds=lease)

    async def charge(order: Any) -> None:
        shop.runs.append(order)
        # The process is stopped in the turn of the loop before the last of the handler's: when it goes on, the end of
        # the lease is due behind that.
        loop = asyncio.get_running_loop()
        wake = loop.create_future()
        loop.call_soon(wake.set_result, None)
        loop.call_soon(time.sleep, 1.5 * lease)
        await wake
        if error is not None:
            raise error

    shop.broker.subscriber("orders", group_id="billing", batch=batch, ack_policy=AckPolicy.NACK_ON_ERROR)(charge)
    shop.publishes(_nothing)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    # Nobody else has taken the key: what the store has recorded counts.
    assert len(shop.runs) == 1
    assert await shop.statuses() == [IdempotencyStatus.FAILED if error else IdempotencyStatus.COMPLETED]
    assert bool(shop.given_up) == (error is not None)


async def test_copies_in_one_batch_are_done_once_and_do_not_wait_for_each_other() -> None:
    shop, batches = Shop(), list[list[str]]()

    @shop.broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(orders: list[dict[str, str]]) -> None:
        batches.append([order["order"] for order in orders])

    shop.publishes(_nothing)
    async with TestKafkaBroker(shop.broker), asyncio.timeout(20):
        # All messages of one batch of the producer's have the same headers.
        await shop.broker.publish_batch({"order": "1"}, {"order": "1"}, topic="orders", headers={"event_id": "e-1"})

    assert batches == [["1"]]
    assert shop.settled == ["ack"]
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_another_payload_under_an_id_of_the_same_batch_is_given_up() -> None:
    shop, batches = Shop(), list[list[str]]()

    @shop.broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.NACK_ON_ERROR)
    async def charge(orders: list[dict[str, str]]) -> None:
        batches.append([order["order"] for order in orders])

    shop.publishes(_nothing)
    async with TestKafkaBroker(shop.broker), asyncio.timeout(20):
        await shop.broker.publish_batch({"order": "1"}, {"order": "2"}, topic="orders", headers={"event_id": "e-1"})

    assert batches == [["1"]]
    assert "KeyReusedError" in shop.given_up[0]
    assert shop.settled == ["ack"]


@pytest.mark.parametrize("policy", [AckPolicy.ACK, AckPolicy.NACK_ON_ERROR])
async def test_without_a_taker_what_is_given_up_comes_again_and_says_each_time_what_to_do(
    policy: AckPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    shop = Shop(takes_given_up=False)
    shop.fails(policy=policy)
    shop.publishes(_nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage"] * 2
    first, second = _errors(caplog)
    assert "no such card" in first
    assert "was given up after attempt 1: PermanentError: no such card" in second
    assert "give IdempotencyMiddleware given_up=" in first
    assert "give IdempotencyMiddleware given_up=" in second


def _errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (record for record in caplog.records if record.name == "integr8s_idem.integrations.faststream")
    return [record.getMessage() for record in ours if record.levelno == logging.ERROR]


async def test_without_a_taker_a_message_without_a_key_and_a_reused_key_come_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Shop(takes_given_up=False)
    shop.sells(None)
    shop.publishes(_nothing)

    async with TestKafkaBroker(shop.broker):
        await shop.broker.publish({"order": "7"}, "orders")
        await shop.place()
        await shop.place(order="8")

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage", "ack", "NackMessage"]
    nameless, reused = _errors(caplog)
    assert "has no header event_id to make a key of. Read more" in nameless
    assert "Give each payload its own id" in reused  # the sentence, not what `repr` shows


async def test_without_a_taker_a_batch_with_a_message_that_cannot_be_done_comes_again_and_the_others_are_done() -> None:
    shop, batches = Shop(takes_given_up=False), list[list[str]]()

    @shop.broker.subscriber("orders", group_id="billing", batch=True, ack_policy=AckPolicy.ACK)
    async def charge(orders: list[dict[str, str]]) -> None:
        batches.append([order["order"] for order in orders])

    shop.publishes(_nothing)
    async with TestKafkaBroker(shop.broker), asyncio.timeout(20):
        for _ in range(2):  # the second body under that id cannot be done
            await shop.broker.publish_batch({"order": "1"}, {"order": "2"}, topic="orders", headers={"event_id": "e-1"})

    assert batches == [["1"]]
    assert shop.settled == ["NackMessage"] * 2
    assert await shop.statuses() == [IdempotencyStatus.COMPLETED]


async def test_without_a_taker_a_batch_whose_run_is_given_up_comes_again() -> None:
    shop = Shop(takes_given_up=False)
    shop.fails(policy=AckPolicy.ACK, batch=True)
    shop.publishes(_nothing)

    async with TestKafkaBroker(shop.broker):
        for _ in range(2):
            await shop.broker.publish_batch({"order": "1"}, topic="orders", headers={"event_id": "e-1"})

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage"] * 2


async def test_what_the_taker_cannot_take_comes_again_until_it_does(caplog: pytest.LogCaptureFixture) -> None:
    shop = Shop()
    shop.fails(policy=AckPolicy.ACK)
    shop.publishes(_nothing)

    async with TestKafkaBroker(shop.broker):
        shop.cannot_take = OSError("no topic")
        await shop.place()
        await shop.place()
        shop.cannot_take = None
        await shop.place()

    assert shop.settled == ["NackMessage", "NackMessage", "AckMessage"]
    assert len(shop.given_up) == 1
    assert "given_up has failed: OSError('no topic')" in _errors(caplog)[1]


async def test_a_function_for_keys_that_fails_lets_the_message_come_again_whatever_the_policy() -> None:
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

    shop.publishes(_nothing)
    async with TestKafkaBroker(shop.broker):
        await shop.place()
        await shop.place()

    assert len(shop.runs) == 1
    assert shop.settled == ["NackMessage", "ack"]
