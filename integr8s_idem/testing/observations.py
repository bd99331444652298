"""What a harness has seen of a service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from integr8s_idem.events import BaseEvent
from integr8s_idem.testing.memory_broker import StoredMessage
from integr8s_idem.worker.dead_letters import PREFIX


@dataclass(slots=True)
class HandlerRun:
    """One run of a handler, from its begin on."""

    service: str
    handler: str
    event: BaseEvent
    attempt: int
    """1 for the first; more means that an earlier run failed, was stopped or crashed."""
    how: str = "running"
    """running, returned, cancelled, the name of the error that it raised, or crashed."""


@dataclass(frozen=True, slots=True)
class DeadLetterSeen:
    """A message that was given up."""

    topic: str
    reason: str
    """handler_failed, previously_failed, key_reused, malformed, …"""
    error: str
    """Class and message of the error, shortened if it is long."""
    attempts: int
    headers: Mapping[str, bytes]
    """All of them; of a name that stands there twice the last."""
    value: bytes | None

    @classmethod
    def of(cls, message: StoredMessage) -> DeadLetterSeen:
        """Read one from the message in its topic."""
        headers = dict(message.headers)

        def told(name: str) -> str:
            return headers.get(PREFIX + name, b"").decode()

        return cls(
            message.topic, told("reason"), told("error-message"), int(told("attempts") or 0), headers, message.value
        )
