"""The consumer: poll, lanes, settle, offsets, retries, dead letters, drain; many services in one process."""

from integr8s_idem.worker.consumer import ServiceReport, ServiceWorker
from integr8s_idem.worker.dead_letters import Replay, record_key_of, replay_of
from integr8s_idem.worker.platform import Background, Platform, Service
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.service_group import ServiceGroup, run_services

__all__ = [
    "Background",
    "EventPublisher",
    "Platform",
    "Replay",
    "Service",
    "ServiceGroup",
    "ServiceReport",
    "ServiceWorker",
    "record_key_of",
    "replay_of",
    "run_services",
]
