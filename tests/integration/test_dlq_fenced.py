"""`dlq` waits for a broker whose metadata temporarily lists no brokers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka.protocol.metadata import MetadataRequest

from integr8s_idem.errors import BrokerUnavailableError
from integr8s_idem.operations.dead_letter_reader import open_dead_letter_reader
from tests.support.kafka.broker import Kafka
from tests.support.workers import kafka_settings

_METADATA = 3
_SIZE, _HEAD = struct.Struct(">i"), struct.Struct(">hhi")
_BY_VERSION = {request.API_VERSION: request for request in MetadataRequest._CLASSES}


class Fenced:
    """A proxy that removes all brokers from the first `left` metadata responses."""

    def __init__(self, kafka: Kafka, left: int) -> None:
        host, _, port = kafka.bootstrap.partition(":")
        self._upstream = host, int(port)
        self.left = left

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        async with server:
            yield f"{host}:{port}"

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection(*self._upstream)
        try:
            while True:
                request = await _frame(reader)
                to_broker.write(_SIZE.pack(len(request)) + request)
                answer = self._changed(request, await _frame(from_broker))
                writer.write(_SIZE.pack(len(answer)) + answer)
        except asyncio.IncompleteReadError:
            return  # the client has gone
        finally:
            to_broker.close()
            writer.close()

    def _changed(self, request: bytes, answer: bytes) -> bytes:
        api, version, _ = _HEAD.unpack_from(request)
        if api != _METADATA or not self.left:
            return answer
        self.left -= 1
        response: Any = _BY_VERSION[version].RESPONSE_TYPE.decode(answer[_SIZE.size :])
        response.brokers = []
        return answer[: _SIZE.size] + bytes(response.encode())


async def _frame(reader: asyncio.StreamReader) -> bytes:
    (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
    return await reader.readexactly(size)


async def test_empty_metadata_is_requested_again(kafka: Kafka, topic_prefix: str) -> None:
    await kafka.create_topics({f"{topic_prefix}orders.dlq": 3})
    async with (
        open_dead_letter_reader(kafka_settings(kafka, topic_prefix)) as reader,
        Fenced(kafka, 3).serve() as bootstrap,
    ):
        reader._kafka = reader._kafka.model_copy(update={"bootstrap_servers": bootstrap})  # this call only
        found = await reader.partitions()

    assert found[f"{topic_prefix}orders.dlq"] == [0, 1, 2]


async def test_metadata_that_stays_empty_is_an_error(kafka: Kafka, topic_prefix: str) -> None:
    settings = kafka_settings(kafka, topic_prefix).model_copy(update={"request_timeout_seconds": 0.5})
    async with open_dead_letter_reader(settings) as reader, Fenced(kafka, 10_000).serve() as bootstrap:
        reader._kafka = settings.model_copy(update={"bootstrap_servers": bootstrap})  # this call only
        with pytest.raises(BrokerUnavailableError):
            await reader.partitions()
