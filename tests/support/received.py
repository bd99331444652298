"""Messages as a broker delivers them, for observers."""

from __future__ import annotations

from collections.abc import Sequence

from integr8s_idem.telemetry import ReceivedMessage
from tests.support.fake_consumer import FakeRecord

OFFSET = 1042
PARTITION = 3


def received(headers: Sequence[tuple[str, bytes]] = (), topic: str = "orders") -> ReceivedMessage:
    """Return a message with `headers`."""
    return FakeRecord(topic, PARTITION, OFFSET, None, b"{}", headers)
