"""The publisher interface of the services."""

from __future__ import annotations

from typing import Protocol

from integr8s_idem import BaseEvent


class Publisher(Protocol):
    """Publishes events and returns once the brokers have confirmed them; otherwise raises `PublishError`."""

    async def publish(self, *events: BaseEvent) -> None: ...
