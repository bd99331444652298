"""Servers that campaigns share: started at the first need, ended with the process."""

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
    """A broker that stays whole: the one that `INTEGR8S_IDEM_TEST_KAFKA` names, or one of our own.

    Raises:
        ToolsMissingError: Neither is there.
    """
    address = os.environ.get(ADDRESS)
    return Kafka(address) if address else own_broker()


def own_broker(settings: Mapping[str, str] | None = None) -> KafkaBroker:
    """A running broker; it ends with the process if nobody ends it before."""
    folder = tempfile.TemporaryDirectory(prefix="idem-kafka-")
    atexit.register(folder.cleanup)
    broker = KafkaBroker(Path(folder.name), settings)
    atexit.register(broker.kill)
    broker.start()
    return broker


@cache
def redis() -> RedisServer:
    """A Redis that stays whole."""
    server = RedisServer()
    atexit.register(server.stop)
    server.start()
    return server


@cache
def home(kind: str) -> Home:
    """A server for records of this kind that stays whole."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(open_home(kind))


async def committed(bootstrap: str, group: str) -> dict[TopicPartition, int]:
    """How far a group has come, as the broker knows it."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        while True:
            try:
                offsets = await admin.list_consumer_group_offsets(group)
            except KafkaError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.1)  # the coordinator is not there yet, or not any more
            else:
                return {partition: known.offset for partition, known in offsets.items()}
    finally:
        await admin.close()


async def is_settled(bootstrap: str, group: str, members: int) -> bool:
    """Whether the coordinator of `group` counts so many members, each of which knows what it holds."""
    admin: Any = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        [description] = await admin.describe_consumer_groups([group])
        [(error, _, state, _, _, known, *_)] = description.groups
        return not error and state == "Stable" and len(known) == members
    finally:
        await admin.close()


async def records(keys: Sequence[str]) -> list[IdempotencyRecord]:
    """What the Redis that stays whole holds of `keys`."""
    async with redis().client() as client:
        return [record for record in await RedisIdempotencyRepository(client).get(keys) if record is not None]
