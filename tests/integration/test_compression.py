"""Every compression codec of Kafka, written by librdkafka and read by an installed worker."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import confluent_kafka
import pytest
from aiokafka.consumer import fetcher
from aiokafka.record.memory_records import MemoryRecords

from integr8s_idem.events import encode_event
from integr8s_idem.telemetry import Signal
from tests.integration.test_worker_redelivery import charging
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.kafka import Kafka
from tests.support.workers import OrderPlaced, open_shop, orders

pytestmark = pytest.mark.kafka

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]
"""Codecs in the order of their numbers in the attributes of a batch."""


@pytest.fixture
def codecs_read(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Record the codecs of the batches that consumers in this process fetch."""
    found = set[str]()

    def read(data: bytes) -> Any:
        batches = MemoryRecords(data)
        while (batch := cast("Any", batches.next_batch())) is not None:
            found.add(CODECS[batch.compression_type])
        return MemoryRecords(data)

    monkeypatch.setattr(fetcher, "MemoryRecords", read)
    return found


def send(bootstrap: str, topic: str, codec: str, events: list[OrderPlaced]) -> None:
    """Publish with librdkafka, in one batch that compresses well."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "compression.type": codec, "linger.ms": 500, "acks": "all"}
    )
    for event in events:
        producer.produce(topic, encode_event(event), partition=0, headers=[("filling", b"x" * 1_000)])
    assert producer.flush(30) == 0


@pytest.mark.parametrize("codec", CODECS)
async def test_a_worker_reads_every_codec_written_by_another_client(
    kafka: Kafka, topic_prefix: str, redis_url: str, codec: str, codecs_read: set[str]
) -> None:
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        worker = await shop.worker(charging(shop))

        await asyncio.to_thread(send, kafka.bootstrap, shop.topic, codec, orders(20))
        await worker.idle(settled=20)

        assert shop.charged == [str(number) for number in range(20)]
        assert codecs_read == {codec}


async def test_a_partition_whose_codec_could_not_be_read_continues_once_the_package_is_installed(
    kafka: Kafka, topic_prefix: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = CountingObserver()
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        with monkeypatch.context() as without_cramjam:
            without_cramjam.setattr("aiokafka.codec.cramjam", None)
            first = await shop.worker(charging(shop))
            first.worker._poller._observer = observer  # type: ignore[union-attr]
            await asyncio.to_thread(send, kafka.bootstrap, shop.topic, "lz4", orders(5))
            await eventually(lambda: observer.counts[Signal.PARTITION_DAMAGED])
            await first.stop()
        assert not shop.charged

        second = await shop.worker(charging(shop))
        await second.idle(settled=5)

        assert shop.charged == [str(number) for number in range(5)]
