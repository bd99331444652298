"""Deliveries for unit tests of the worker."""

from __future__ import annotations

from integr8s_idem.worker.assignments import Assignment, Delivery
from integr8s_idem.worker.kafka_protocols import Partition
from tests.support.fake_consumer import FakeRecord


def assignment(topic: str = "orders", partition: int = 0) -> Assignment:
    return Assignment(Partition(topic, partition))


def delivery(to: Assignment, offset: int, *, key: bytes | None = None, value: bytes = b"x") -> Delivery:
    return Delivery(FakeRecord(to.partition.topic, to.partition.partition, offset, key, value), to)
