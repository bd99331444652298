"""An embedded Kafka for development: an emulator, not Apache Kafka."""

from __future__ import annotations

import asyncio
from typing import Any

from integr8s_idem.config.message_text import installing
from integr8s_idem.embedded.tcp_front import Front
from integr8s_idem.errors import ApplicationError

_START_SECONDS = 10.0

PARTITIONS = 4
"""Number of partitions of every topic; the emulator does not support others."""


class EmbeddedKafka:
    """One broker on a loopback port, running in threads of this process.

    This is an emulator: topics, records and offsets are kept by the mock cluster
    inside librdkafka, consumer groups by `integr8s_idem.embedded.consumer_groups`.  Other
    processes of this machine may connect.  All data is lost at `stop`.

    Topics are created on first use, with `PARTITIONS` partitions.
    A partition keeps about 5 MB and deletes older messages, consumed or not.
    There is no admin API, no access control and no durability.

    Raises:
        ApplicationError: By `start`: the extra `embedded` is not installed.
    """

    def __init__(self) -> None:
        self._emulator: Any = None
        self._front: Front | None = None

    @property
    def bootstrap_servers(self) -> str:
        """host:port.  Raises before `start`."""
        if self._front is None:
            raise RuntimeError("the embedded Kafka is not running")
        return f"{self._front.host}:{self._front.port}"

    def start(self) -> None:
        """Open the port.  Clients can connect when this returns."""
        self._emulator = _emulator()
        broker = next(iter(self._emulator.list_topics(timeout=_START_SECONDS).brokers.values()))
        self._front = Front((broker.host, broker.port))
        self._front.start()

    def stop(self) -> None:
        """Close all connections and delete all topics."""
        front, self._front = self._front, None
        if front is not None:
            front.stop()
        self._emulator = None  # librdkafka stops its threads when the object is freed

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
    # Hides the notice about the mock cluster, but not errors.
    return Producer({"test.mock.num.brokers": 1, "log_level": 4})
