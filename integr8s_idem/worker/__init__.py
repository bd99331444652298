"""The Kafka worker of a service: poll, decode, reserve, run handlers, record outcomes, commit."""

from integr8s_idem.worker.consumer import ServiceReport, ServiceWorker
from integr8s_idem.worker.dead_letters import Replay, record_key_of, replay_of
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.publisher import EventPublisher

__all__ = ["EventPublisher", "Record", "Replay", "ServiceReport", "ServiceWorker", "record_key_of", "replay_of"]
