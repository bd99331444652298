"""A real Apache Kafka for tests."""

from tests.support.kafka.broker import Kafka, KafkaBroker, ToolsMissingError

__all__ = ["Kafka", "KafkaBroker", "ToolsMissingError"]
