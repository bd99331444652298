"""Servers shared by campaigns: started on first use, and stopped with the process."""

from __future__ import annotations

import asyncio
import atexit
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from integr8s_idem import IdempotencyRecord
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.support.homes import Home, open_home
from tests.support.kafka.broker import Kafka, KafkaBroker
from tests.support.kafka.fixtures import ADDRESS
from tests.support.redis import RedisServer


@cache
def kafka() -> Kafka:
    """Return a broker that no test kills: that of `INTEGR8S_IDEM_TEST_KAFKA`, or a new one.

    Raises:
        ToolsMissingError: The variable is not set, and no broker can be started.
    """
    address = os.environ.get(ADDRESS)
    return Kafka(address) if address else own_broker()


def own_broker(settings: Mapping[str, str] | None = None) -> KafkaBroker:
    """Start a broker; it is killed with the process at the latest."""
    folder = tempfile.TemporaryDirectory(prefix="idem-kafka-")
    atexit.register(folder.cleanup)
    broker = KafkaBroker(Path(folder.name), settings)
    atexit.register(broker.kill)
    broker.start()
    return broker


@cache
def redis() -> RedisServer:
    """Return a Redis that no test kills."""
    server = RedisServer()
    atexit.register(server.stop)
    server.start()
    return server


@cache
def home(kind: str) -> Home:
    """Return a server for this kind of store that no test kills."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(open_home(kind))


async def committed(bootstrap: str, group: str) -> dict[TopicPartition, int]:
    """Return the committed offsets of a group."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        while True:
            try:
                offsets = await admin.list_consumer_group_offsets(group)
            except KafkaError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.1)  # the coordinator is not available
            else:
                return {partition: offset.offset for partition, offset in offsets.items()}
    finally:
        await admin.close()


async def is_settled(bootstrap: str, group: str, members: int) -> bool:
    """Return whether `group` is stable and has this number of members."""
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        [description] = await admin.describe_consumer_groups([group])
        [(error, _, state, _, _, known, *_)] = description.groups
        return not error and state == "Stable" and len(known) == members
    finally:
        await admin.close()


async def records(keys: Sequence[str]) -> list[IdempotencyRecord]:
    """Return the records of `keys` in the shared Redis."""
    async with redis().client() as client:
        return [record for record in await RedisIdempotencyRepository(client).get(keys) if record is not None]
