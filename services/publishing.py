"""What the services ask of whoever publishes for them."""

from __future__ import annotations

from typing import Protocol

from integr8s_idem.events import BaseEvent


class Publisher(Protocol):
    """Publishes events and returns once the broker has them; raises `PublishError` if it may not."""

    async def publish(self, *events: BaseEvent) -> None: ...
