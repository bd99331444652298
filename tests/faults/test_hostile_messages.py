"""Hostile messages: dead-lettered unchanged by the worker, in bounded time and memory.

Broker and store are in memory, except in the tests that are marked kafka.
"""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from typing import Any, Literal

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.record.util import calc_crc32c

from integr8s_idem.config import ReplaySettings
from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.events import BaseEvent, EventDecoder, encode_event
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.kafka_protocols import Partition
from tests.kafka_faults import servers
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import KEYS, open_workload
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.fake_consumer import FakeBroker, FakeRecord
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.kafka.broker import Kafka
from tests.support.replays import TRUSTED
from tests.support.workers import OrderPlaced as RealOrder
from tests.support.workers import Shop, header, open_shop

TOPIC = Partition("order_placed", 0)
DEAD = "order_placed.dlq"
MEBIBYTE = 1_048_576
LONGEST_SECONDS = 3.0
"""Processor time, on a slow machine; most messages take a hundredth of a second."""
MOST_BYTES = 64 * MEBIBYTE


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"
    extra: Any = None


VALID = encode_event(OrderPlaced(event_id="1"))


def with_extra(extra: bytes) -> bytes:
    """Return a valid event with these bytes as a value."""
    return VALID.replace(b'"extra":null', b'"extra":' + extra)


def filled(piece: bytes) -> bytes:
    """Repeat `piece` up to the size of the largest message that a broker accepts by default."""
    return piece * (MEBIBYTE // len(piece))


HOSTILE: dict[str, tuple[bytes | None, str]] = {
    "tombstone": (None, "empty"),
    "empty": (b"", "empty"),
    "truncated": (VALID[:-20], "malformed"),
    "two documents": (VALID + VALID, "malformed"),
    "not json": (filled(b"x"), "malformed"),
    "not utf-8": (with_extra(b'"\xff\xfe"'), "malformed"),
    "overlong utf-8": (with_extra(b'"\xc0\x80"'), "malformed"),
    "utf-16": (VALID.decode().encode("utf-16"), "malformed"),
    "byte order mark": (b"\xef\xbb\xbf" + VALID, "malformed"),
    "not a number": (with_extra(b"NaN"), "malformed"),
    "infinity": (with_extra(b"-Infinity"), "malformed"),
    "infinite by size": (with_extra(b"1e999"), "malformed"),
    "a million digits": (with_extra(b"9" * 1_000_000), "malformed"),
    "a million decimal places": (with_extra(b"0." + b"9" * 1_000_000 + b"x"), "malformed"),
    "a duplicate name": (VALID[:-1] + b',"event_id":"2"}', "malformed"),
    "a duplicate name with escapes": (VALID[:-1] + b',"event\\u005fid":"2"}', "malformed"),
    "a nested duplicate name": (with_extra(b'[{"a":{"b":1,"b":2}}]'), "malformed"),
    "a name a hundred thousand times": (b"{" + filled(b'"a":1,') + b'"a":1}', "malformed"),
    "deep lists": (with_extra(b"[" * 100_000 + b"]" * 100_000), "malformed"),
    "unterminated deep lists": (filled(b"["), "malformed"),
    "deep objects": (filled(b'{"a":'), "malformed"),
    "a lone surrogate": (with_extra(b'"\\ud800"'), "malformed"),
    "an unterminated string": (with_extra(b'"' + filled(b"\\")), "malformed"),
    "many empty lists": (with_extra(b"[" + filled(b"[],") + b"[]}"), "malformed"),
    "many small objects": (with_extra(b"[" + filled(b'{"a":0},') + b"0"), "malformed"),
    "a missing id": (b'{"event_type":"order_placed"}', "missing_id"),
    "an empty id": (VALID.replace(b'"event_id":"1"', b'"event_id":""'), "missing_id"),
    "an id that is not a string": (VALID.replace(b'"event_id":"1"', b'"event_id":1'), "missing_id"),
    "an id of a megabyte": (VALID.replace(b'"event_id":"1"', b'"event_id":"' + filled(b"1") + b'"'), "invalid"),
    "an unknown type": (VALID.replace(b'"order_placed"', b'"order_eaten"'), "unknown_type"),
    "a type of a megabyte": (VALID.replace(b'"order_placed"', b'"' + filled(b"x") + b'"'), "unknown_type"),
    "another major version": (VALID.replace(b'"1.0"', b'"2.0"'), "unsupported_version"),
}


@pytest.mark.scenario(81, 82, 83)
@pytest.mark.parametrize(("body", "reason"), HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_body_is_rejected_in_bounded_time_and_memory(body: bytes | None, reason: str) -> None:
    decoder = EventDecoder([OrderPlaced])
    began = time.thread_time()

    with pytest.raises(UndecodableEventError) as caught:
        decoder.decode(body)

    seconds = time.thread_time() - began
    tracemalloc.start()  # not while time is measured: it makes decoding several times slower
    with pytest.raises(UndecodableEventError):
        decoder.decode(body)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 500
    assert seconds < LONGEST_SECONDS
    assert most < MOST_BYTES


@pytest.mark.scenario(84, 110)
@pytest.mark.parametrize(
    "extra",
    [
        b'"' + filled(b"x") + b'"',
        b"[" + filled(b"[],") + b"[]]",
        b"[" + filled(b'{"a":0},') + b"0]",
        b"{" + b",".join(b'"%d":0' % number for number in range(100_000)) + b"}",
    ],
    ids=["one string", "empty lists", "small objects", "many names"],
)
def test_a_valid_event_at_the_brokers_limit_is_decoded_in_bounded_time_and_memory(extra: bytes) -> None:
    decoder = EventDecoder([OrderPlaced])
    body = with_extra(extra)
    began = time.thread_time()
    decoder.decode(body)
    seconds = time.thread_time() - began

    tracemalloc.start()
    event = decoder.decode(body)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert isinstance(event, OrderPlaced)
    assert seconds < LONGEST_SECONDS
    assert most < 2 * MOST_BYTES


async def dead_letters_of(*records: tuple[bytes | None, Any], replay: ReplaySettings | None = None) -> list[FakeRecord]:
    """Run a worker on messages with these bodies and headers and a valid event, and return its dead letters."""
    broker, runs, router = FakeBroker(), list[str](), EventRouter()

    @router.on(OrderPlaced)
    async def handle(event: OrderPlaced) -> None:
        runs.append(event.order_id)

    for body, headers in records:
        broker.put("order_placed", body, headers=headers)
    broker.publish(OrderPlaced(order_id="valid"))
    async with running(IdempotentEventDispatcher(router, guarded().manager), broker, replay=replay) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == len(records) + 1)
    assert runs[-1] == "valid"
    return broker.values(DEAD)


def dlq_header(dead_letter: FakeRecord, name: str) -> bytes:
    return dict(dead_letter.headers)[f"idempotency-dlq-{name}"]


@pytest.mark.scenario(81, 82, 83)
@virtual_time
async def test_hostile_bodies_are_dead_lettered_unchanged_and_the_worker_continues() -> None:
    small = {name: case for name, case in HOSTILE.items() if len(case[0] or b"") < 600_000}

    dead_letters = await dead_letters_of(*((body, [("x", b"\xfe")]) for body, _ in small.values()))

    assert [dead_letter.value for dead_letter in dead_letters] == [body for body, _ in small.values()]
    assert [dlq_header(dead_letter, "reason").decode() for dead_letter in dead_letters] == [
        reason for _, reason in small.values()
    ]
    assert {dead_letter.headers[0] for dead_letter in dead_letters} == {("x", b"\xfe")}


HEADERS: dict[str, Any] = {
    "none": [],
    "null values": [("a", None), ("traceparent", None), ("event_id", None)],
    "repeated": [("a", b"1"), ("a", b"2"), ("traceparent", b"00-x"), ("traceparent", b"\xff")],
    "not utf-8": [("a", b"\xff\xfe"), ("traceparent", b"\xff"), ("tracestate", b"\x80=\x80")],
    "ten thousand": [(f"h{number}", b"x") for number in range(10_000)],
    "empty names": [("", b""), ("", b"")],
    "names of the library": [
        ("idempotency-dlq-reason", b"earlier"),
        ("event_type", b"another"),
        ("event_id", b"another"),
    ],
}


@pytest.mark.scenario(85)
@pytest.mark.parametrize("headers", HEADERS.values(), ids=list(HEADERS))
@virtual_time
async def test_arbitrary_headers_are_kept_in_the_dead_letter_and_have_no_other_effect(headers: Any) -> None:
    began = time.thread_time()

    dead_letters = await dead_letters_of((b"not json", headers), (VALID, headers))

    assert time.thread_time() - began < LONGEST_SECONDS
    assert [dead_letter.value for dead_letter in dead_letters] == [b"not json"]
    assert dead_letters[0].headers[: len(headers)] == headers
    assert dlq_header(dead_letters[0], "reason") == b"malformed"


@pytest.mark.scenario(85)
@pytest.mark.parametrize("generation", [b"", None, b"-1", b"1e3", b"\xff", b"1" * 100_000, "²".encode()])
@virtual_time
async def test_a_generation_that_is_not_a_number_is_never_guessed(generation: bytes | None) -> None:
    message = VALID, [("idempotency-generation", generation)]

    assert await dead_letters_of(message) == []  # handled as if it had no such header

    # If the settings trust every producer, an invalid generation is an error.
    dead_letters = await dead_letters_of(message, replay=TRUSTED)
    assert [dlq_header(dead_letter, "reason") for dead_letter in dead_letters] == ([b"invalid"] if generation else [])
    assert all(len(dlq_header(dead_letter, "error-message")) < 1_000 for dead_letter in dead_letters)


@pytest.mark.scenario(110)
def test_names_with_colliding_hashes_in_other_languages_cost_no_more_than_others() -> None:
    """Python seeds the hashes of strings; the parser must use them."""
    decoder = EventDecoder([OrderPlaced])
    colliding = ["".join("Aa" if number >> bit & 1 else "BB" for bit in range(13)) for number in range(2**13)]
    plain = [f"{number:026d}" for number in range(2**13)]

    def seconds(names: list[str]) -> float:
        body = with_extra(json.dumps(dict.fromkeys(names, 0)).encode())
        began = time.thread_time()
        decoder.decode(body)
        return time.thread_time() - began

    assert min(seconds(colliding) for _ in range(5)) < 10 * min(seconds(plain) for _ in range(5))


# With a real Kafka.

LARGEST = 1_040_000
"""Size of the largest body that a broker accepts by default, without headers and framing."""


def order_of(size: int) -> RealOrder:
    """Return an event whose body has `size` bytes."""
    small = RealOrder(event_id=str(size), order_id="")
    return small.model_copy(update={"order_id": "x" * (size - len(encode_event(small)))})


def charging(shop: Shop) -> EventRouter:
    router = EventRouter()

    @router.on(RealOrder)
    async def charge(event: RealOrder) -> None:
        shop.charged.append(event.event_id)

    return router


@pytest.mark.kafka
@pytest.mark.scenario(84)
@pytest.mark.parametrize("size", [LARGEST, 3 * LARGEST], ids=["default limit", "larger than one fetch"])
async def test_an_event_at_the_brokers_limit_is_handled_and_settled(
    kafka: Kafka, topic_prefix: str, redis_url: str, size: int
) -> None:
    async with open_shop(kafka, topic_prefix, redis_url, partitions=2) as shop:
        if size > LARGEST:
            await set_max_message_bytes(shop, 4 * LARGEST)
        large, small = order_of(size), [RealOrder(event_id=f"{n}", order_id="1") for n in range(20)]
        publisher = EventPublisher(shop.settings.model_copy(update={"max_event_bytes": 4 * LARGEST}))
        await publisher.publish(large, *small)
        await publisher.close()
        worker = await shop.worker(charging(shop))

        await worker.idle(settled=21)

        assert len(encode_event(large)) == size
        assert sorted(shop.charged) == sorted(event.event_id for event in [large, *small])
        assert worker.tally.dead_letters == 0


async def set_max_message_bytes(shop: Shop, size: int) -> None:
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=shop.kafka.bootstrap)
    await admin.start()
    configs: Any = {"max.message.bytes": str(size)}
    await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, shop.topic, configs)])
    await admin.close()


@pytest.mark.kafka
@pytest.mark.scenario(85)
@pytest.mark.parametrize("kind", ["none", "null values", "repeated", "not utf-8", "ten thousand"])
async def test_arbitrary_headers_pass_a_real_broker(kafka: Kafka, topic_prefix: str, redis_url: str, kind: str) -> None:
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        event = order_of(1_000)
        await shop.publisher.send(shop.topic, None, b"not json", HEADERS[kind])
        await shop.publisher.send(shop.topic, None, encode_event(event), HEADERS[kind])
        worker = await shop.worker(charging(shop))

        await worker.idle(settled=2)

        [dead_letter] = await shop.messages(f"{shop.topic}.dlq", 1)
        assert shop.charged == [event.event_id]
        assert (dead_letter.value, header(dead_letter, "reason")) == (b"not json", "malformed")
        assert list(dead_letter.headers[: len(HEADERS[kind])]) == HEADERS[kind]


@pytest.mark.kafka
@pytest.mark.scenario(85)
async def test_an_invalid_utf8_header_name_stops_only_its_partition_with_an_alarm() -> None:
    need_kafka()
    observer = CountingObserver()
    async with open_workload(servers.kafka()) as workload:
        member = await workload.join()
        await eventually(lambda: member.worker.health().ready)
        member.worker._poller._observer = observer  # type: ignore[union-attr]
        damaged = workload.partition_of("0-0")
        await send_with_bad_name(workload.settings.bootstrap_servers, workload.topic, damaged)
        await eventually(lambda: observer.counts[Signal.PARTITION_DAMAGED])
        await workload.publish_round()

        others = {work for work in workload.published if workload.partition_of(work) != damaged}
        await eventually(lambda: workload.effects.done() >= others, state=workload.snapshot)

        assert observer.counts[Signal.PARTITION_DAMAGED] == 1
        assert workload.effects.done() == others
        assert len(others) < KEYS


async def send_with_bad_name(bootstrap: str, topic: str, partition: int) -> None:
    """Send a message with a header name that is invalid UTF-8."""
    producer: Any = AIOKafkaProducer(bootstrap_servers=bootstrap)
    await producer.start()
    batch = producer.create_batch()
    batch.append(timestamp=None, key=None, value=VALID, headers=[("bad name", b"1")])
    built = bytearray(batch._build()).replace(b"bad name", b"bad n\xffm\xfe")
    built[17:21] = struct.pack(">I", calc_crc32c(built[21:]))
    batch._buffer = built
    await (await producer.send_batch(batch, topic, partition=partition))
    await producer.stop()
