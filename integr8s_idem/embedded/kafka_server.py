"""An embedded Kafka for trying things out: an emulator, not Apache Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

from integr8s_idem.config.message_text import installing
from integr8s_idem.embedded.tcp_front import Front
from integr8s_idem.errors import ApplicationError

_START_SECONDS = 10.0

PARTITIONS = 4
"""Partitions of every topic; the emulator offers no way to choose."""


class EmbeddedKafka:
    """One broker on a loopback port, in threads of this process.

    This is an emulator: topics, records and offsets are kept by the mock cluster
    inside librdkafka, consumer groups by `integr8s_idem.embedded.consumer_groups`.  Other
    processes of this machine may connect.  Nothing outlives `stop`.

    Topics appear when a client first names them, with `PARTITIONS` partitions.
    A partition keeps about its newest 5 MB and forgets what is older, read or not.
    There is no admin API, no access control, no durability.

    Raises:
        ApplicationError: By `start`: the extra `embedded` is not installed.
    """

    def __init__(self) -> None:
        self._emulator: Any = None
        self._front: Front | None = None

    @property
    def bootstrap_servers(self) -> str:
        """host:port; an error before `start`."""
        if self._front is None:
            raise RuntimeError("the embedded Kafka is not running")
        return f"{self._front.host}:{self._front.port}"

    def start(self) -> None:
        """Open the port; clients can connect when this returns."""
        self._emulator = _emulator()
        broker = next(iter(self._emulator.list_topics(timeout=_START_SECONDS).brokers.values()))
        self._front = Front((broker.host, broker.port))
        self._front.start()

    def stop(self) -> None:
        """Close every connection and forget every topic."""
        front, self._front = self._front, None
        if front is not None:
            front.stop()
        self._emulator = None  # librdkafka ends its threads with the object

    async def __aenter__(self) -> EmbeddedKafka:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)


def _emulator() -> Any:
    try:
        from confluent_kafka import Producer
    except ImportError as error:
        raise ApplicationError(
            f"the embedded Kafka needs confluent-kafka, which is not installed; {installing('embedded')}"
        ) from error
    # Below its notice about the mock cluster, above which it reports what goes wrong.
    return Producer({"test.mock.num.brokers": 1, "log_level": 4})
