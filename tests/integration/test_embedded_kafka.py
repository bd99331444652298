"""The embedded Kafka with aiokafka clients."""

import asyncio
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import IncompatibleBrokerVersion

from integr8s_idem.embedded import EmbeddedKafka
from integr8s_idem.embedded.kafka_server import PARTITIONS
from integr8s_idem.embedded.tcp_front import Front

MEMBER = """
import asyncio, sys
from aiokafka import AIOKafkaConsumer

async def main(server):
    member = AIOKafkaConsumer("orders", bootstrap_servers=server, group_id="billing",
                              session_timeout_ms=1000, heartbeat_interval_ms=200)
    await member.start()
    print(len(member.assignment()), flush=True)
    while True:
        await member.getmany(timeout_ms=100)

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    kafka = EmbeddedKafka()
    kafka.start()
    yield kafka.bootstrap_servers
    kafka.stop()


def consumer(server: str, topic: str, group: str) -> Any:
    """Return a consumer with the worker's settings and a short session."""
    return AIOKafkaConsumer(
        topic,
        bootstrap_servers=server,
        group_id=group,
        enable_auto_commit=False,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        session_timeout_ms=1000,
        heartbeat_interval_ms=200,
        rebalance_timeout_ms=20_000,
    )


async def publish(server: str, topic: str, *values: bytes) -> None:
    producer: Any = AIOKafkaProducer(bootstrap_servers=server, enable_idempotence=True, acks="all")
    await producer.start()
    try:
        for value in values:
            await producer.send_and_wait(topic, value, partition=0)
    finally:
        await producer.stop()


async def read(member: Any, count: int) -> list[bytes]:
    values: list[bytes] = []
    async with asyncio.timeout(10):
        while len(values) < count:
            batches = await member.getmany(timeout_ms=200)
            values += [record.value for batch in batches.values() for record in batch]
    return values


async def test_a_subscription_before_the_first_event_creates_the_topic(server: str) -> None:
    async with consumer(server, "early", "g") as member:
        assigned = member.assignment()
        await publish(server, "early", b"1")

        assert assigned == {TopicPartition("early", number) for number in range(PARTITIONS)}
        assert await read(member, 1) == [b"1"]


async def test_a_group_continues_after_its_commit_and_a_new_group_starts_at_the_first_event(server: str) -> None:
    await publish(server, "twice", b"1", b"2", b"3")
    async with consumer(server, "twice", "one") as member:
        await read(member, 3)
        await member.commit({TopicPartition("twice", 0): 2})

    async with consumer(server, "twice", "one") as same, consumer(server, "twice", "other") as other:
        assert await read(same, 1) == [b"3"]
        assert await read(other, 3) == [b"1", b"2", b"3"]


async def test_a_producer_with_acks_0_gets_no_response(server: str) -> None:
    """The emulator does send a response, which must not be taken for the next one."""
    host, port = server.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    produce = struct.pack(">hhihhhii", 0, 3, 7, -1, -1, 0, 1000, 0)  # correlation 7, acks 0, no records
    versions = struct.pack(">hhih", 18, 0, 8, -1)  # correlation 8

    for frame in (produce, versions):
        writer.write(struct.pack(">i", len(frame)) + frame)
    answer = await asyncio.wait_for(reader.readexactly(8), timeout=10)
    writer.close()
    await writer.wait_closed()

    assert struct.unpack(">ii", answer)[1] == 8


async def test_creating_topics_with_an_admin_client_is_refused(server: str) -> None:
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=server)
    await admin.start()
    try:
        with pytest.raises(IncompatibleBrokerVersion, match="CreateTopics"):
            await admin.create_topics([])
    finally:
        await admin.close()


async def test_events_reach_a_waiting_consumer_before_its_fetches_time_out(server: str) -> None:
    """A fetch waits up to half a second; if the emulator slept for all of it, twenty would take ten seconds."""
    producer: Any = AIOKafkaProducer(bootstrap_servers=server)
    async with producer, consumer(server, "fast", "g") as member:
        async with asyncio.timeout(5):
            for value in (b"%d" % number for number in range(20)):
                await member.getmany(timeout_ms=20)
                await producer.send_and_wait("fast", value, partition=0)
                assert await read(member, 1) == [value]


def start_member(server: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", MEMBER, server], stdout=subprocess.PIPE, text=True)


async def test_a_waiting_replacement_gets_the_partitions_of_a_killed_member(server: str) -> None:
    killed, replacement = start_member(server), None
    try:
        assert killed.stdout is not None
        assert await asyncio.to_thread(killed.stdout.readline) == f"{PARTITIONS}\n"

        killed.kill()
        replacement = start_member(server)

        assert replacement.stdout is not None
        assert await asyncio.to_thread(replacement.stdout.readline) == f"{PARTITIONS}\n"
    finally:
        end(killed, replacement)


def end(*processes: "subprocess.Popen[str] | None") -> None:
    for process in processes:
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            process.communicate()


async def test_two_members_share_the_partitions(server: str) -> None:
    async with consumer(server, "shared", "g") as first, consumer(server, "shared", "g") as second:
        async with asyncio.timeout(10):
            while len(first.assignment()) != PARTITIONS // 2:
                await first.getmany(timeout_ms=100)

        assert first.assignment() | second.assignment() == {
            TopicPartition("shared", number) for number in range(PARTITIONS)
        }


async def test_a_stopped_kafka_closes_its_port() -> None:
    async with EmbeddedKafka() as kafka:
        host, port = kafka.bootstrap_servers.split(":")

    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(host, int(port))


def test_a_front_stopped_immediately_after_its_start_closes_its_thread_and_loop() -> None:
    for _ in range(20):
        front = Front(("127.0.0.1", 1))

        front.start()
        front.stop()

        assert front._loop.is_closed()
