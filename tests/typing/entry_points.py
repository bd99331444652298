"""The types of each entry point, as a user's type checker sees them.  Checked by mypy; nothing here is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, Literal, assert_type

import httpx
from aiokafka import AIOKafkaConsumer, ConsumerRecord
from confluent_kafka import Consumer, Message
from dishka import make_async_container
from faststream.kafka import KafkaBroker
from litestar import Litestar
from litestar.middleware import DefineMiddleware
from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from integr8s_idem import (
    BaseEvent,
    Batch,
    EventRouter,
    IdempotencyManager,
    Once,
    PartialFailureError,
    Steps,
    Verdict,
    committable_offsets,
    idempotent,
)
from integr8s_idem.codecs import Codec, Headers
from integr8s_idem.integrations import aiokafka as aiokafka_loops
from integr8s_idem.integrations import confluent as confluent_loops
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.integrations.faststream import IdempotencyMiddleware
from integr8s_idem.integrations.httpx import BlockingRetryingTransport, RetryingTransport, idempotency_key
from integr8s_idem.integrations.openapi import with_idempotency_keys
from integr8s_idem.records import Reserved


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str


@dataclass
class Refund:
    amount: Decimal


@idempotent(key="refund:{order_id}", ttl=timedelta(days=1), lock_timeout=timedelta(seconds=10))
async def refund(order_id: str, amount: Decimal) -> Refund:
    return Refund(amount)


@idempotent(key=lambda order_id: f"invoice:{order_id}", fingerprint=["order_id"])
def invoice(order_id: str, *, copies: int = 1) -> str | None:
    return None


class Desk:
    @idempotent(key=["order.order_id"])
    async def close(self, order: OrderPlaced) -> None: ...

    @staticmethod
    @idempotent(key="count:{day}", re_execute_on_read=True)
    def count(day: str) -> int:
        return 0


async def a_decorated_function_keeps_its_type(desk: Desk) -> None:
    assert_type(await refund("7", amount=Decimal(30)), Refund)
    assert_type(invoice("7", copies=2), str | None)
    assert_type(Desk.count("today"), int)
    await desk.close(OrderPlaced(order_id="7"))
    kept: Callable[[str, Decimal], Awaitable[Refund]] = refund
    assert_type(await kept("7", Decimal(1)), Refund)
    running: Coroutine[Any, Any, Refund] = refund("7", Decimal(1))
    running.close()


async def a_wrong_argument_is_an_error() -> None:
    await refund(7, Decimal(1))  # type: ignore[arg-type]
    invoice("7", pages=2)  # type: ignore[call-arg]


async def a_step_has_the_type_of_its_function(steps: Steps, manager: IdempotencyManager) -> None:
    async def reserve(order_id: str) -> list[int]:
        return [len(order_id)]

    assert_type(await steps.run("reserve", reserve, "7"), list[int])
    assert_type(await steps.run("again", reserve, "7", once="at_most_once"), list[int])
    assert_type(manager.attempt().key_for("ship"), str)
    assert_type(await manager.steps().run("ship", reserve, order_id="7", once=Once.AT_MOST_ONCE), list[int])


async def a_batch_has_a_verdict_for_each_key(manager: IdempotencyManager, reservations: Sequence[Reserved]) -> None:
    verdicts = await manager.acquire_batch(["order:1", "order:2"])
    assert_type(verdicts, dict[str, Verdict])
    assert_type(await manager.confirm_batch(reservations), list[bool])
    assert_type(await manager.confirm_batch({reservations[0]: {"receipt": 1}}), list[bool])
    assert_type(await manager.release_batch(reservations), list[bool])


class OrderPaid(BaseEvent):
    event_type: Literal["order_paid"] = "order_paid"


def a_handler_takes_the_event_that_it_is_registered_for(router: EventRouter) -> None:
    @router.on(OrderPlaced, name="charge")
    async def charge(event: OrderPlaced, *, attempts: int = 1) -> str:
        return event.order_id

    @router.on(OrderPlaced)
    async def note(event: BaseEvent) -> None: ...

    @router.on(OrderPlaced, OrderPaid)
    async def count(event: OrderPlaced | OrderPaid) -> None: ...

    @router.on(OrderPaid)  # type: ignore[arg-type]
    async def another(event: OrderPlaced) -> None: ...

    @router.on(OrderPlaced)  # type: ignore[arg-type]
    async def text(event: str) -> None: ...

    @router.on(OrderPlaced, OrderPaid)  # type: ignore[arg-type]
    async def half(event: OrderPlaced) -> None: ...

    @router.on(OrderPlaced)  # type: ignore[arg-type]
    async def nothing() -> None: ...

    kept: Coroutine[Any, Any, str] = charge(OrderPlaced(order_id="7"), attempts=2)
    kept.close()


def a_batch_handler_keeps_its_type(router: EventRouter) -> None:
    @router.on_batch(OrderPlaced, max_size=10, max_wait=timedelta(milliseconds=5))
    async def charge(events: Sequence[OrderPlaced], batch: Batch) -> list[str]:
        assert_type(batch.attempts[0].number, int)
        if not events:
            raise PartialFailureError({0: ValueError("no stock")}, ["receipt"])
        return [event.order_id for event in events]

    kept: Callable[[Sequence[OrderPlaced], Batch], Awaitable[list[str]]] = charge
    router.on_batch(OrderPlaced, name="again")(kept)


async def a_loop_returns_the_type_of_its_function(
    consumer: AIOKafkaConsumer, blocking: Consumer, manager: IdempotencyManager
) -> None:
    async def charge(record: ConsumerRecord[Any, Any]) -> int:
        return record.offset

    def charge_plainly(message: Message) -> str:
        return message.topic() or ""

    key = aiokafka_loops.by_header("event_id")
    async for delivery in aiokafka_loops.guarded(consumer, manager, key=key):
        assert_type(await delivery.run(charge), int)
    for one in confluent_loops.guarded(blocking, manager, key=confluent_loops.by_header("event_id")):
        assert_type(one.run(charge_plainly), str)


def starlette_accepts_the_middleware(app: Starlette, manager: IdempotencyManager) -> None:
    app.add_middleware(
        IdempotencyKeyMiddleware, manager=manager, required=True, identity=lambda asking: str(asking.user.id)
    )


async def clients_accept_the_transports() -> None:
    httpx.AsyncClient(transport=RetryingTransport(httpx.AsyncHTTPTransport()))
    httpx.Client(transport=BlockingRetryingTransport(httpx.HTTPTransport()))
    assert_type(idempotency_key("order-7"), str)


class AvroCodec:
    def fields(self, body: bytes, headers: Headers) -> Mapping[str, Any]:
        return {"event_id": body.decode()}


def a_custom_codec_implements_the_protocol() -> Codec:
    return AvroCodec()


def committable_offsets_are_keyed_by_partition(records: Sequence[ConsumerRecord[Any, Any]]) -> None:
    assert_type(committable_offsets(records, undone={("orders", 0, 17)}), dict[tuple[str, int], int])


async def ask(connection: HTTPConnection) -> str:
    return str(connection.user.id)


def litestar_accepts_the_middleware(manager: IdempotencyManager) -> None:
    app = Litestar(middleware=[DefineMiddleware(IdempotencyKeyMiddleware, manager=manager, identity=anyone)])
    app.asgi_handler = IdempotencyKeyMiddleware(app.asgi_handler, manager=manager, identity=ask)


def an_openapi_document_keeps_its_type(document: dict[str, Any]) -> None:
    assert_type(with_idempotency_keys(document, required=True), dict[str, Any])


def faststream_accepts_the_middleware(manager: IdempotencyManager) -> None:
    async def keep(record: Any, error: Exception) -> None: ...

    guard = IdempotencyMiddleware(manager, key=aiokafka_loops.by_header("event_id"), given_up=keep)
    guard.check(KafkaBroker("localhost:9092", middlewares=[guard]))


@idempotent(key="mail:{address}", on_failure="block", container=make_async_container())
async def mail(address: str) -> bool:
    return True


async def policies_can_be_given_as_strings(manager: IdempotencyManager) -> None:
    assert_type(await mail("a@b.example"), bool)
    await manager.run("order:1", lambda: mail("a"), on_failure="retry", on_in_progress="raise")
    await manager.run("order:1", lambda: mail("a"), on_failure="blokc")  # type: ignore[arg-type]
