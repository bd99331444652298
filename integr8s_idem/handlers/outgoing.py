"""Events that a handler publishes, and who publishes them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from msgspec import Struct

from integr8s_idem.events import BaseEvent, Message, derived_event_id


class Outgoing(Struct, eq=False):
    """Outgoing events of a handler, which are published after the handler and its scope have succeeded."""

    events: list[BaseEvent] | None = None
    """As passed to `publish`; `None` if there are none, as usual."""

    def publish(self, event: BaseEvent) -> None:
        """Publish `event` after the handler has succeeded.

        Unless its id is set, it is derived from the key of the incoming event and the order of the calls.  So another
        run publishes the same ids, and consumers recognize the duplicates.
        """
        if self.events is None:
            self.events = []
        self.events.append(event)

    def finished(self, incoming: BaseEvent, key: str, service: str) -> list[BaseEvent]:
        """Return the events to publish, in the order of the calls.

        They have their final ids, the name of `service`, and the correlation id of `incoming`.
        """
        return [_finish(event, index, incoming, key, service) for index, event in enumerate(self.events or ())]


def _finish(event: BaseEvent, index: int, incoming: BaseEvent, key: str, service: str) -> BaseEvent:
    own = event.metadata
    metadata = own.model_copy(
        update={
            "correlation_id": own.correlation_id or incoming.metadata.correlation_id or incoming.event_id,
            "service_name": own.service_name or service,
            # The user of the incoming event is used only if the handler did not set metadata.
            "user_id": own.user_id if "metadata" in event.model_fields_set else incoming.metadata.user_id,
        }
    )
    update: dict[str, object] = {"metadata": metadata}
    if "event_id" not in event.model_fields_set:
        update["event_id"] = derived_event_id(key, index)
    return event.model_copy(update=update)


class Publisher(Protocol):
    """Publishes events."""

    async def publish(self, *events: BaseEvent) -> None:
        """Publish events, and return when the broker has confirmed all of them.

        Raises:
            PublishError: An event was not confirmed.
        """
        ...


@runtime_checkable
class MessageMaker(Publisher, Protocol):
    """A publisher that can also encode events as messages, to be sent later."""

    def message(self, event: BaseEvent) -> Message:
        """Encode `event` as a message."""
        ...
