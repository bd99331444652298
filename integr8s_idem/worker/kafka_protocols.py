"""Protocols of the Kafka client, so that another client or a simulated one can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiokafka import TopicPartition as Partition

from integr8s_idem._util.committable_offsets import Placed

__all__ = ["Consumer", "Partition", "Record"]


class Record(Placed, Protocol):
    """A message from a broker."""

    @property
    def timestamp(self) -> int:
        """Milliseconds since the Unix epoch, by the clock of the producer or the broker."""
        ...

    @property
    def key(self) -> bytes | None:
        """The Kafka key; `None` if the producer gave none."""
        ...

    @property
    def value(self) -> bytes | None:
        """The body; `None` for a tombstone."""
        ...

    @property
    def headers(self) -> Sequence[tuple[str, bytes]]:
        """Names and values, in the order in which the producer added them; a name may repeat."""
        ...


class Consumer(Protocol):
    """The methods of `aiokafka.AIOKafkaConsumer` that the worker uses."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def subscribe(self, topics: Sequence[str], *, listener: Any) -> None: ...
    async def getmany(self, *partitions: Any, timeout_ms: int, max_records: int) -> Mapping[Any, Sequence[Any]]: ...
    async def commit(self, offsets: Mapping[Any, int]) -> None: ...
    async def position(self, partition: Any) -> int: ...
    def seek(self, partition: Any, offset: int) -> None: ...
    def pause(self, *partitions: Any) -> None: ...
    def resume(self, *partitions: Any) -> None: ...
    def assignment(self) -> set[Any]: ...
    def highwater(self, partition: Any) -> int | None: ...
    async def end_offsets(self, partitions: Sequence[Any]) -> Mapping[Any, int]:
        """Ask the brokers for the end of committed messages, without open transactions."""
        ...
