"""Consumer loops over a real Kafka with aiokafka and confluent-kafka that record the end of each delivery."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import confluent_kafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition

from integr8s_idem import IdempotencyManager
from integr8s_idem.failures import FailureRule
from integr8s_idem.integrations import aiokafka, confluent
from integr8s_idem.integrations.kafka_loops import KeyOf, by_header
from tests.support.conditions import eventually
from tests.support.gated import GatedWork, Run
from tests.support.kafka import Kafka

SESSION = 3.0
"""Session timeout in seconds."""

COORDINATOR_MOVES = frozenset(
    {
        confluent_kafka.KafkaError.NOT_COORDINATOR,
        confluent_kafka.KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        confluent_kafka.KafkaError.COORDINATOR_NOT_AVAILABLE,
    }
)
"""Retryable errors that a broker returns until the group has a coordinator."""


@dataclass(frozen=True, slots=True)
class End:
    """The result of a delivery."""

    partition: int
    offset: int
    value: Any = None
    error: BaseException | None = None
    given_up: Exception | None = None


class Topic:
    """A topic, its producer and the committed offset of its group."""

    def __init__(self, kafka: Kafka, name: str) -> None:
        self.kafka = kafka
        self.name = name
        self.group = f"{name}.group"

    async def create(self, partitions: int = 1) -> None:
        await self.kafka.create_topics({self.name: partitions})

    async def put(self, *records: tuple[str | None, str], partition: int = 0) -> int:
        """Send records, each an id for the header `event_id` and a body; return the last offset."""
        producer = AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap)
        await producer.start()
        try:
            sent = [
                await producer.send(
                    self.name, body.encode(), partition=partition, headers=[("event_id", name.encode())] if name else []
                )
                for name, body in records
            ]
            return max([int((await one).offset) for one in sent])
        finally:
            await producer.stop()

    async def committed(self, partition: int = 0) -> int:
        """Return the committed offset of a partition; 0 if there is none."""
        return await asyncio.to_thread(self._committed, partition)

    def _committed(self, partition: int) -> int:
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self.kafka.bootstrap, "group.id": self.group})
        try:
            return max(_committed_offset(consumer, confluent_kafka.TopicPartition(self.name, partition)), 0)
        finally:
            consumer.close()


def _committed_offset(
    consumer: confluent_kafka.Consumer, partition: confluent_kafka.TopicPartition, timeout: float = 30.0
) -> int:
    """Return the committed offset; retry while a broker that has just started moves the group's coordinator."""
    until = time.monotonic() + timeout
    while True:
        try:
            [found] = consumer.committed([partition], timeout=10)
            return int(found.offset)
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() not in COORDINATOR_MOVES or time.monotonic() > until:
                raise
        time.sleep(0.1)


class Loop(ABC):
    """The consumer loop of a process."""

    def __init__(
        self,
        topic: Topic,
        manager: IdempotencyManager,
        work: GatedWork,
        *,
        key: KeyOf | None = None,
        takes_given_up: bool = False,
        most: int | None = None,
        is_left_by_errors: bool = False,
        commit_interval: float = 0.2,
        settings: Mapping[str, Any] | None = None,
        failures: Sequence[FailureRule] | None = None,
    ) -> None:
        """
        Args:
            takes_given_up: Whether it has a handler for records that are given up.
            most: Leave the loop immediately after this many deliveries.
            is_left_by_errors: Whether an error leaves the loop, which is then entered again with the same consumer.
            settings: Settings of the consumer, by Kafka's names with underscores.
            failures: Rules for errors of its function.
        """
        self.topic = topic
        self.manager = manager
        self.work = work
        self.key = key or by_header("event_id")
        self.takes_given_up = takes_given_up
        self.failures = failures
        self.most = most
        self.is_left_by_errors = is_left_by_errors
        self.commit_interval = timedelta(seconds=commit_interval)
        self.settings = {"session_timeout_ms": int(SESSION * 1000), "heartbeat_interval_ms": 300, **(settings or {})}
        self.ends: list[End] = []
        self.revocations = 0
        """How often partitions were revoked."""
        self._given_up: list[Exception] = []

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None:
        """Leave the loop, which commits, and the group. Raise the error of the loop, if any."""

    @abstractmethod
    async def die(self) -> None:
        """Leave the loop by cancellation or interruption, without waiting for its work."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the loop has ended."""

    @property
    @abstractmethod
    def assigned(self) -> set[int]:
        """The assigned partitions."""

    async def ended(self, count: int) -> Sequence[End]:
        """Return once `count` deliveries have ended, or the loop has."""
        await eventually(lambda: len(self.ends) >= count or self.over, state=lambda: self.ends)
        return self.ends

    def _record_end(self, record: Any, value: Any = None, error: BaseException | None = None) -> None:
        given_up = self._given_up.pop() if self._given_up else None
        self.ends.append(End(record.partition, record.offset, value, error, given_up))

    def _run(self, value: bytes | None) -> Run:
        attempt = self.manager.attempt()
        return Run((value or b"").decode(), attempt.number, attempt.fence)

    def _is_last(self) -> bool:
        return self.most is not None and len(self.ends) >= self.most


class AiokafkaLoop(Loop):
    async def start(self) -> None:
        self._consumer = AIOKafkaConsumer(
            bootstrap_servers=self.topic.kafka.bootstrap,
            group_id=self.topic.group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            **self.settings,
        )
        self._consumer.subscribe([self.topic.name], listener=_Listener(self))
        await self._consumer.start()
        self._task = asyncio.create_task(self._loop())

    async def _loop(self) -> None:
        while await self._is_left_by_an_error():
            pass

    async def _is_left_by_an_error(self) -> bool:
        deliveries = aiokafka.guarded(
            self._consumer,
            self.manager,
            key=self.key,
            given_up=self._give_up if self.takes_given_up else None,
            failures=self.failures,
            commit_interval=self.commit_interval,
        )
        async with aclosing(deliveries):
            async for delivery in deliveries:
                try:
                    await self._handle(delivery)
                except Exception as error:  # noqa: BLE001  # the loop continues after errors
                    self._record_end(delivery.record, error=error)
                    if self.is_left_by_errors:
                        return True
                if self._is_last():
                    break
        return False

    async def _handle(self, delivery: aiokafka.Delivery) -> None:
        """Handle a delivery; tests may replace this."""
        self._record_end(delivery.record, await delivery.run(self._call))

    async def _call(self, record: Any) -> Any:
        return await self.work(self._run(record.value))

    async def _give_up(self, record: Any, error: Exception) -> None:
        self._given_up.append(error)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._consumer.stop()
        if not self._task.cancelled():
            self._task.result()

    async def die(self) -> None:
        await self.stop()

    @property
    def over(self) -> bool:
        return self._task.done()

    @property
    def assigned(self) -> set[int]:
        return {each.partition for each in self._consumer.assignment()}


class _Listener(ConsumerRebalanceListener):
    def __init__(self, loop: AiokafkaLoop) -> None:
        self._of = loop

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        self._of.revocations += bool(revoked)

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None: ...


class ConfluentLoop(Loop):
    async def start(self) -> None:
        settings = {name.replace("_", "."): value for name, value in self.settings.items()}
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.topic.kafka.bootstrap,
                "group.id": self.topic.group,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                **settings,
            }
        )
        self._consumer.subscribe([self.topic.name], on_assign=self._take, on_revoke=self._revoked)
        self._assigned: set[int] = set()
        self._stop = threading.Event()
        self._thread = asyncio.create_task(asyncio.to_thread(self._loop))

    def _take(self, consumer: Any, assigned: Sequence[Any]) -> None:
        self._assigned = {each.partition for each in assigned}

    def _revoked(self, consumer: Any, revoked: Sequence[Any]) -> None:
        self.revocations += bool(revoked)
        self._assigned = set()

    def _loop(self) -> None:
        try:
            while self._is_left_by_an_error():
                pass
        except KeyboardInterrupt:
            self.work.interrupted.clear()
        finally:
            self._consumer.close()

    def _is_left_by_an_error(self) -> bool:
        for delivery in confluent.guarded(
            self._consumer,
            self.manager,
            key=self.key,
            given_up=self._give_up if self.takes_given_up else None,
            failures=self.failures,
            commit_interval=self.commit_interval,
            stop=self._stop,
        ):
            try:
                self._handle(delivery)
            except Exception as error:  # noqa: BLE001  # the loop continues after errors
                self._record_end(delivery.record, error=error)
                if self.is_left_by_errors:
                    return True
            if self._is_last():
                break
        return False

    def _handle(self, delivery: confluent.Delivery) -> None:
        """Handle a delivery; tests may replace this."""
        self._record_end(delivery.record, delivery.run(self._call))

    def _call(self, message: Any) -> Any:
        return self.work.here(self._run(message.value()))

    def _give_up(self, message: Any, error: Exception) -> None:
        self._given_up.append(error)

    async def stop(self) -> None:
        self._stop.set()
        await self._thread

    async def die(self) -> None:
        self.work.interrupted.set()
        await self._thread

    @property
    def over(self) -> bool:
        return self._thread.done()

    @property
    def assigned(self) -> set[int]:
        return self._assigned  # the consumer must not be called from this thread: it may be waiting for it
