"""Handler runs and dead letters recorded by a harness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from integr8s_idem.events import BaseEvent
from integr8s_idem.testing.memory_broker import StoredMessage
from integr8s_idem.worker.dead_letters import PREFIX


@dataclass(slots=True)
class HandlerRun:
    """One run of a handler, or one call of its reconcile function, recorded from its start."""

    service: str
    handler: str
    event: BaseEvent
    attempt: int
    """1 for the first attempt; higher if earlier runs failed, were stopped or crashed."""
    how: str = "running"
    """running, returned, cancelled, crashed, or the class name of the error; of a reconcile function: Done, NotDone or
    Unknown instead of returned."""


@dataclass(frozen=True, slots=True)
class DeadLetterSeen:
    """A message that was given up."""

    topic: str
    reason: str
    """handler_failed, outcome_unknown, previously_failed, key_reused, malformed, …"""
    error: str
    """Class and message of the error, shortened if necessary."""
    attempts: int
    headers: Mapping[str, bytes]
    """All headers; for repeated names the last value."""
    value: bytes | None

    @classmethod
    def of(cls, message: StoredMessage) -> DeadLetterSeen:
        """Parse a message of a dead-letter topic."""
        headers = dict(message.headers)

        def text(name: str) -> str:
            return headers.get(PREFIX + name, b"").decode()

        return cls(
            message.topic, text("reason"), text("error-message"), int(text("attempts") or 0), headers, message.value
        )
