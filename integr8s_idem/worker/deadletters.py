"""Dead letters: the message as it came, with headers that say why it is there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from integr8s_idem.ledger import describe_error
from integr8s_idem.worker.records import Record

PREFIX = "idempotency-dlq-"
"""What all our headers start with; those of the message stay as they are."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Why a message is given up.  Texts are UTF-8, bounded; no payload beyond the message itself."""

    reason: str
    """One of a closed set, fit for a metric label: `handler_failed`, `malformed`, …"""
    error: BaseException | str
    handler: str = ""
    key: str = ""
    """The idempotency key as people read it."""
    attempts: int = 0

    def headers(self, record: Record, service: str, group: str) -> list[tuple[str, bytes]]:
        """The message's own headers, byte for byte, and ours behind them."""
        error = self.error
        told = {
            "reason": self.reason,
            "error-class": type(error).__name__ if isinstance(error, BaseException) else "",
            "error-message": describe_error(error) if isinstance(error, BaseException) else error,
            "service": service,
            "group": group,
            "handler": self.handler,
            "key": self.key,
            "attempts": str(self.attempts) if self.attempts else "",
            "topic": record.topic,
            "partition": str(record.partition),
            "offset": str(record.offset),
            "timestamp": str(record.timestamp),
            "failed-at": str(int(time.time() * 1000)),
        }
        ours = [(PREFIX + name, text.encode("utf-8", "backslashreplace")) for name, text in told.items() if text]
        return [*record.headers, *ours]
