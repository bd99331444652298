"""The events that a `WorkerHarness` has seen, and those that it finds in messages of an outbox."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.events import BaseEvent, EventDecoder, Message


@dataclass(slots=True)
class Events:
    """Events by id, of all processes."""

    made: dict[str, BaseEvent] = field(default_factory=dict)
    """Events that publishers of the harness have serialized."""
    published: dict[str, BaseEvent] = field(default_factory=dict)

    def note_published(self, message: Message) -> None:
        """Note the event of a message that the broker has confirmed.

        An event that an `Outbox` has written is decoded from its row, which may be of another process or an earlier
        test.  Without a class for its type, it is not noted.
        """
        event = self.made.get(message.event_id) or _decoded(message)
        if event is not None:
            self.published.setdefault(message.event_id, event)


def _decoded(message: Message) -> BaseEvent | None:
    classes = [each for each in _subclasses(BaseEvent) if each.model_fields["event_type"].default == message.event_type]
    if not classes:
        return None
    try:
        return EventDecoder(classes[-1:]).decode(message.value)
    except UndecodableEventError:
        return None  # a row that a test has written itself, and whose consumer dead-letters it


def _subclasses(event: type[BaseEvent]) -> Iterator[type[BaseEvent]]:
    for each in event.__subclasses__():
        yield each
        yield from _subclasses(each)
