"""Dead letters: the message as it came, with headers that say why it is there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.ledger import describe_error
from integr8s_idem.worker.records import Record

PREFIX = "idempotency-dlq-"
"""What all our headers start with; those of the message stay as they are."""


GENERATION = "idempotency-generation"
"""Header of a message that is to be handled anew on purpose: how often it was, as a decimal number.

A record of an earlier generation, FAILED or COMPLETED, does not block it and stays as it is.
"""


def generation_of(record: Record) -> int:
    """How often `record` was replayed on purpose; 0 for all that come by themselves.

    Raises:
        UndecodableEventError: The header holds no number from 0 to 999.
    """
    told = [value for name, value in record.headers if name == GENERATION]
    if not told:
        return 0
    text = (told[-1] or b"")[:20]
    if not (text.isdigit() and len(text) <= 3):
        raise UndecodableEventError("invalid", f"header {GENERATION} holds no number from 0 to 999: {text!r}")
    return int(text)


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
    event_type: str = ""
    """Empty where none could be read."""

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
