"""Fields of log records: the delivery, request or run in which a handler or the library logs."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from io import StringIO
from types import ModuleType
from typing import Any
from unittest import mock

import httpx
import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from integr8s_idem import EventRouter, IdempotencyManager, IdempotentEventDispatcher, idempotent
from integr8s_idem.cli.log_format import JsonFormatter
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.integrations import aiokafka
from integr8s_idem.integrations.asgi import IdempotencyKeyMiddleware, anyone
from integr8s_idem.telemetry.log_fields import ContextFilter, context_fields, logging_with
from integr8s_idem.telemetry.opentelemetry import OpenTelemetryObserver
from integr8s_idem.testing.span_recorder import SpanRecorder
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import running
from tests.support.guarded import guarded, plain_manager
from tests.support.pipelines import ParcelSent, all_committed, dispatcher_of, key_of, parcels, reserved_by_another, sent

SHOP = logging.getLogger("shop")
PLACE = ("topic", "partition", "offset", "event_id")


class Lines:
    """The lines that the handler of `integr8s-idem run` writes."""

    def __init__(self, *, keys: bool = False) -> None:
        self._written = StringIO()
        self.handler = logging.StreamHandler(self._written)
        self.handler.setFormatter(JsonFormatter())
        self.handler.addFilter(ContextFilter(keys=keys))

    @property
    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._written.getvalue().splitlines()]

    def of(self, logger: str) -> list[dict[str, Any]]:
        """Return the lines of a logger."""
        return [line for line in self.all if line["logger"] == logger]

    def with_text(self, text: str) -> dict[str, Any]:
        """Return the only line whose message contains `text`."""
        [line] = [line for line in self.all if text in line["message"]]
        return line


@pytest.fixture
def open_lines() -> Iterator[Callable[..., Lines]]:
    root, opened = logging.getLogger(), list[Lines]()
    level = root.level
    root.setLevel(logging.INFO)

    def open_(**options: Any) -> Lines:
        opened.append(Lines(**options))
        root.addHandler(opened[-1].handler)
        return opened[-1]

    yield open_
    root.setLevel(level)
    for each in opened:
        root.removeHandler(each.handler)


@pytest.fixture
def lines(open_lines: Callable[..., Lines]) -> Lines:
    return open_lines()


def recording_observer() -> OpenTelemetryObserver:
    return OpenTelemetryObserver("billing", tracer_provider=TracerProvider(shutdown_on_exit=False))


async def log_parcel(event: ParcelSent) -> None:
    SHOP.info("parcel %d", event.number)


@virtual_time
async def test_a_line_of_a_handler_contains_its_delivery_and_its_run(lines: Lines) -> None:
    broker = FakeBroker()
    broker.publish(*parcels(2), partition=3)

    async with running(dispatcher_of(log_parcel, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    line = lines.with_text("parcel 1")
    assert {name: line[name] for name in line if name not in ("timestamp", "level", "logger", "message")} == {
        "service": "billing",
        "topic": "parcel_sent",
        "partition": 3,
        "offset": 1,
        "event_id": "parcel-1",
        "event_type": "parcel_sent",
        "handler": "handle",
        "attempt": 1,
    }


@virtual_time
@pytest.mark.parametrize("is_guarded", [True, False])
async def test_the_second_attempt_and_its_retry_state_their_attempts(is_guarded: bool, lines: Lines) -> None:
    async def fail_once(event: ParcelSent) -> None:
        SHOP.info("running")
        await asyncio.sleep(0)
        if len(lines.of("shop")) == 1:
            raise ValueError("try again")

    async with running(dispatcher_of(fail_once, guarded() if is_guarded else None), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    assert [line["attempt"] for line in lines.of("shop")] == [1, 2]
    retry = lines.with_text("retrying in")
    assert (retry["attempt"], retry["handler"], retry["event_id"], retry["offset"]) == (1, "handle", "parcel-0", 0)


@virtual_time
async def test_concurrent_deliveries_and_tasks_that_they_start_do_not_mix(lines: Lines) -> None:
    together = asyncio.Barrier(4)

    async def log_often(event: ParcelSent) -> None:
        async def inner() -> None:
            await together.wait()
            for _ in range(3):
                SHOP.info("parcel %d", event.number)
                await asyncio.sleep(0.01)

        await asyncio.gather(inner(), inner())

    broker = sent(2, partitions=2)
    async with running(dispatcher_of(log_often, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    logged = [(line["message"], line["event_id"], line["partition"]) for line in lines.of("shop")]
    assert sorted(logged) == [("parcel 0", "parcel-0", 0)] * 6 + [("parcel 1", "parcel-1", 1)] * 6
    assert logged != sorted(logged), "they did not run concurrently"


@virtual_time
async def test_two_handlers_of_one_event_are_named(lines: Lines) -> None:
    router = EventRouter()
    for name in ("charge", "ship"):
        router.on(ParcelSent, name=name)(log_parcel)

    async with running(IdempotentEventDispatcher(router, guarded().manager), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    assert sorted(line["handler"] for line in lines.of("shop")) == ["charge", "ship"]


@virtual_time
@pytest.mark.parametrize("recorded", [False, True], ids=["without spans", "with spans"])
async def test_the_line_of_a_dead_letter_names_the_event(recorded: bool, lines: Lines) -> None:
    async def fail(event: ParcelSent) -> None:
        raise ValueError("broken")

    here = guarded(max_attempts=2)
    if recorded:
        here.manager = IdempotencyManager(here.manager.config, here.store, recording_observer(), scope="billing")
    async with running(dispatcher_of(fail, here), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    line = lines.with_text("dead-lettered")
    assert [line[name] for name in PLACE] == ["parcel_sent", 0, 0, "parcel-0"]
    assert (line["service"], line["handler"], line["event_type"], line["attempt"]) == (
        "billing",
        "handle",
        "parcel_sent",
        2,
    )
    assert line["exception.type"] == "ValueError"
    assert ("trace_id" in line) == recorded


@virtual_time
async def test_the_line_of_an_undecodable_message_names_its_place(lines: Lines) -> None:
    broker = FakeBroker()
    broker.put("parcel_sent", b"{", partition=1)
    broker.put("parcel_sent", b"{}", partition=0, headers=[("event_id", b"p-1"), ("event_type", b"parcel_sent")])

    async with running(dispatcher_of(log_parcel, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    unknown, known = (lines.with_text(f"dead-lettered parcel_sent[{number}]@0") for number in (1, 0))
    place = [unknown[name] for name in ("service", "topic", "partition", "offset")]
    assert place == ["billing", "parcel_sent", 1, 0]
    assert "event_id" not in unknown
    assert (known["event_id"], known["event_type"]) == ("p-1", "parcel_sent")


@virtual_time
async def test_the_line_of_a_lost_lease_names_the_event_and_the_attempt(lines: Lines) -> None:
    here = guarded()

    async def lose(event: ParcelSent) -> None:
        if not lines.of("shop"):
            SHOP.info("losing")
            await here.store.delete([key_of(here, 0)])
            await reserved_by_another(here, 0, timedelta(minutes=1))
            await asyncio.sleep(120)

    async with running(dispatcher_of(lose, here), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    line = lines.with_text("lost the reservation")
    assert [line[name] for name in PLACE] == ["parcel_sent", 0, 0, "parcel-0"]
    assert line["attempt"] == 1


@virtual_time
async def test_keys_are_in_lines_only_if_they_are_allowed(open_lines: Callable[..., Lines]) -> None:
    default, allowed = open_lines(), open_lines(keys=True)
    # Handlers share the record, so that the first one must not see what is added for the second one.
    broker = FakeBroker()
    broker.publish(ParcelSent(aggregate_id="customer-1", event_id="e-1"))

    async with running(dispatcher_of(log_parcel, guarded()), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert {"record_key", "message_key"} & default.of("shop")[0].keys() == set()
    line = allowed.of("shop")[0]
    assert line["message_key"] == "customer-1"
    assert line["record_key"].endswith("e-1")


@virtual_time
async def test_nothing_is_known_outside_of_a_delivery(lines: Lines) -> None:
    started = asyncio.Event()

    async def wait(event: ParcelSent) -> None:
        started.set()
        await asyncio.sleep(1)

    async with running(dispatcher_of(wait, guarded()), sent(1)) as worker:
        await started.wait()
        SHOP.info("during")
        await worker.until(lambda: all_committed(worker))
        SHOP.info("after")

    for line in lines.of("shop"):
        assert set(line) == {"timestamp", "level", "logger", "message"}


@virtual_time
async def test_lines_of_a_batch_contain_what_its_events_have_in_common(lines: Lines) -> None:
    async def handle(events: Sequence[ParcelSent]) -> None:
        SHOP.info("%d parcels", len(events))

    router = EventRouter()
    router.on_batch(ParcelSent, name="handle", max_size=2)(handle)
    dispatcher = IdempotentEventDispatcher(router, guarded().manager)

    async with running(dispatcher, sent(2), ordering="none") as worker:
        await worker.until(lambda: all_committed(worker))

    [line] = lines.of("shop")
    assert line["message"] == "2 parcels"
    assert {"offset", "event_id"} & line.keys() == set()
    assert (line["service"], line["topic"], line["handler"], line["attempt"]) == ("billing", "parcel_sent", "handle", 1)


@virtual_time
async def test_the_line_of_a_batch_with_one_event_contains_the_current_span(lines: Lines) -> None:
    spans: list[otel.SpanContext] = []

    async def handle(events: Sequence[ParcelSent]) -> None:
        spans.append(otel.get_current_span().get_span_context())
        SHOP.info("batch")

    router = EventRouter()
    router.on_batch(ParcelSent, name="handle", max_size=2)(handle)
    here = guarded(observer=recording_observer())

    async with running(IdempotentEventDispatcher(router, here.manager), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    assert lines.of("shop")[0]["span_id"] == otel.format_span_id(spans[0].span_id)


@virtual_time
async def test_a_warning_about_headers_of_a_trace_that_is_not_recorded_is_logged_once(lines: Lines) -> None:
    """The SDK logs it when a line asks for the current span, which parses the headers."""
    broker = FakeBroker()
    traceparent = f"00-{1:032x}-{1:016x}-00".encode()
    headers: Any = [("traceparent", traceparent), ("tracestate", b"a b c")]
    broker.put("parcel_sent", ParcelSent(number=7).model_dump_json().encode(), headers=headers)

    async with running(dispatcher_of(log_parcel, guarded(observer=recording_observer())), broker) as worker:
        await worker.until(lambda: all_committed(worker))

    assert [line["message"] for line in lines.of("shop")] == ["parcel 7"]
    assert len([line for line in lines.all if "a b c" in line["message"]]) == 1


@virtual_time
async def test_the_line_of_an_error_that_ends_the_service_names_the_event(lines: Lines) -> None:
    class WorkerOutOfOrder(BaseException):
        pass

    recorder = SpanRecorder()
    here = guarded(observer=recorder.observer("billing"))
    with (
        mock.patch.object(GuardedExecution, "call_patiently", side_effect=WorkerOutOfOrder),
        pytest.raises(WorkerOutOfOrder),
    ):
        async with running(dispatcher_of(log_parcel, here), sent(1)) as worker:
            await worker.task

    line = lines.with_text("because of a bug")
    assert [line[name] for name in PLACE] == ["parcel_sent", 0, 0, "parcel-0"]
    span = recorder.spans().one("process parcel_sent")
    assert (span.outcome, span.attempt, span.failed) == ("released", 1, True)


@virtual_time
async def test_a_line_contains_the_current_span(lines: Lines) -> None:
    spans: list[otel.SpanContext] = []

    async def handle(event: ParcelSent) -> None:
        spans.append(otel.get_current_span().get_span_context())
        SHOP.info("traced")

    here = guarded()
    here.manager = IdempotencyManager(here.manager.config, here.store, recording_observer(), scope="billing")

    async with running(dispatcher_of(handle, here), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    [line] = lines.of("shop")
    assert line["trace_id"] == otel.format_trace_id(spans[0].trace_id)
    assert line["span_id"] == otel.format_span_id(spans[0].span_id)


async def test_a_line_of_a_decorated_function_contains_service_and_attempt(lines: Lines) -> None:
    manager = plain_manager()

    @idempotent(key="order:{order}", manager=manager)
    async def charge(order: str) -> None:
        SHOP.info("charging %s", order)

    await charge("7")
    SHOP.info("after")

    line, after = lines.of("shop")
    assert (line["service"], line["attempt"]) == ("billing", 1)
    assert "service" not in after


def test_a_line_of_a_plain_decorated_function_contains_service_and_attempt(lines: Lines) -> None:
    manager = plain_manager()

    @idempotent(key="order:{order}", manager=manager)
    def charge(order: str) -> None:
        SHOP.info("charging %s", order)

    charge("7")

    assert [(line["service"], line["attempt"]) for line in lines.of("shop")] == [("billing", 1)]


async def test_a_line_of_a_guarded_request_contains_service_and_attempt(lines: Lines) -> None:
    async def pay(request: object) -> PlainTextResponse:
        SHOP.info("paying")
        return PlainTextResponse("paid")

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    guard = IdempotencyKeyMiddleware(app, plain_manager(), identity=anyone)

    transport = httpx.ASGITransport(app=guard)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        assert (await client.post("/pay", headers={"Idempotency-Key": '"1"'})).text == "paid"

    assert [(line["service"], line["attempt"]) for line in lines.of("shop")] == [("billing", 1)]


async def test_a_line_of_an_own_loop_contains_the_place_of_the_message(lines: Lines) -> None:
    broker: Any = None
    headers = [("event_id", b"e-1"), ("event_type", b"order")]
    record: Any = FakeRecord("orders", 2, 17, b"customer-1", b"{}", headers)
    delivery = aiokafka.Delivery(broker, plain_manager(), record, aiokafka.by_position, None, None)

    async def charge(record: object) -> None:
        SHOP.info("charging")

    await delivery.run(charge)
    SHOP.info("after")

    line, after = lines.of("shop")
    assert [line[name] for name in PLACE] == ["orders", 2, 17, "e-1"]
    assert (line["service"], line["attempt"], line["handler"].rpartition(".")[2]) == ("billing", 1, "charge")
    assert "topic" not in after


@virtual_time
async def test_a_handler_that_the_application_calls_knows_its_event(lines: Lines) -> None:
    dispatcher = dispatcher_of(log_parcel, guarded())

    await dispatcher.dispatch(ParcelSent(event_id="e-1"))

    [line] = lines.of("shop")
    assert (line["service"], line["event_id"], line["handler"], line["attempt"]) == ("billing", "e-1", "handle", 1)


def test_attributes_that_the_application_has_set_are_kept() -> None:
    record = logging.makeLogRecord({"topic": "mine"})

    with logging_with(topic="orders", offset=1):
        ContextFilter().filter(record)

    assert vars(record)["topic"] == "mine"
    assert vars(record)["offset"] == 1


def test_a_record_factory_of_the_application_may_set_the_same_names(lines: Lines) -> None:
    made = logging.getLogRecordFactory()

    def with_service(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = made(*args, **kwargs)
        vars(record)["attempt"] = "first"
        return record

    logging.setLogRecordFactory(with_service)
    try:
        with logging_with(attempt=2):
            SHOP.info("hello")
    finally:
        logging.setLogRecordFactory(made)

    assert lines.of("shop")[0]["attempt"] == "first"


def test_a_line_is_logged_while_the_tracing_api_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))  # still empty

    assert context_fields() == {}


def test_a_message_without_a_context_has_no_fields() -> None:
    assert context_fields(keys=True) == {}
