"""Handle each event once, even when Kafka delivers it twice.

The public API.  Names that need a driver (redis, aiokafka) are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from integr8s_idem._util.committable_offsets import committable_offsets
from integr8s_idem.config import IdempotencyConfig, Section, Settings, load_settings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.step_slots import Once
from integr8s_idem.engine.steps import Steps
from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import (
    IdempotencyConflictError,
    IdempotencyError,
    PartialFailureError,
    PermanentError,
    RetryAfter,
)
from integr8s_idem.events import BaseEvent, EventMetadata, derived_event_id
from integr8s_idem.functions.decorator import idempotent
from integr8s_idem.handlers.dispatcher import (
    EventDispatcher,
    IdempotentEventDispatcher,
    IdempotentEventHandler,
    with_idempotency,
)
from integr8s_idem.handlers.handler_calls import Batch
from integr8s_idem.handlers.observing_dispatcher import ObservingEventDispatcher
from integr8s_idem.handlers.outgoing import Outgoing
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys.event_keys import KeyResolver, KeyStrategy
from integr8s_idem.records import IdempotencyRecord, IdempotencyStatus, Verdict
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.memory import MemoryIdempotencyRepository

if TYPE_CHECKING:
    from integr8s_idem.runtime import Platform, Service, run_services
    from integr8s_idem.stores.redis import RedisIdempotencyRepository
    from integr8s_idem.worker import EventPublisher

__all__ = [
    "Attempt",
    "BaseEvent",
    "Batch",
    "EventDispatcher",
    "EventMetadata",
    "EventPublisher",
    "EventRouter",
    "IdempotencyConfig",
    "IdempotencyConflictError",
    "IdempotencyError",
    "IdempotencyManager",
    "IdempotencyRecord",
    "IdempotencyRepository",
    "IdempotencyStatus",
    "IdempotentEventDispatcher",
    "IdempotentEventHandler",
    "KeyResolver",
    "KeyStrategy",
    "MemoryIdempotencyRepository",
    "ObservingEventDispatcher",
    "Once",
    "Outgoing",
    "PartialFailureError",
    "PermanentError",
    "Platform",
    "RedisIdempotencyRepository",
    "RetryAfter",
    "Section",
    "Service",
    "Settings",
    "Steps",
    "Verdict",
    "committable_offsets",
    "derived_event_id",
    "idempotent",
    "load_settings",
    "run_services",
    "with_idempotency",
]

_LAZY_IMPORTS: Final = {
    "EventPublisher": "integr8s_idem.worker",
    "Platform": "integr8s_idem.runtime",
    "RedisIdempotencyRepository": "integr8s_idem.stores.redis",
    "Service": "integr8s_idem.runtime",
    "run_services": "integr8s_idem.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)
