"""Subscribers of FastStream that can be guarded, and the keys of their messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from faststream import AckPolicy
from faststream.exceptions import StopConsume
from faststream.kafka.subscriber.usecase import BatchSubscriber

from integr8s_idem.errors import ApplicationError, ServiceStoppedError
from integr8s_idem.keys import EntryPoint, Key


def key_of_message(group: str, subscriber: str, text: str) -> Key:
    """Return the key of a message for one subscriber; `text` identifies the message."""
    return Key.of_entry(EntryPoint.FASTSTREAM, group, subscriber, text, name=f"{subscriber} {text}")


class SubscriberError(ApplicationError, StopConsume):
    """A subscriber is configured in a way that would lose messages.  FastStream stops it."""


class SubscriberStoppedError(ServiceStoppedError, StopConsume):
    """A rule stops a subscriber because of an error of its handler.  FastStream stops it."""


NO_BATCHES: Final = (
    "rules for errors (failures=) do not apply to batches, in which only one message may be the cause: give "
    "subscribers with batch=True a broker whose IdempotencyMiddleware has no rules"
)

_SAFE: Final = frozenset({AckPolicy.ACK, AckPolicy.REJECT_ON_ERROR, AckPolicy.NACK_ON_ERROR})


def has_group(subscriber: Any) -> bool:
    """Whether a subscriber has a `group_id`.  Without one no offsets are committed and nothing is redelivered."""
    return bool(getattr(subscriber, "group_id", None))


def check_subscriber(subscriber: Any, others: Iterable[Any]) -> None:
    """Check that a subscriber can be guarded.  Subscribers without a group or without a function are ignored.

    `others`: the subscribers that are guarded as well, such as those of its broker; it may be one of them.

    Raises:
        SubscriberError: It may acknowledge a message before the record of the message is completed; or it has no
            stable name, or the name of another subscriber of its group.
    """
    if not has_group(subscriber) or not subscriber.calls:
        return
    check_ack_policy(subscriber)
    name, group = name_of(subscriber), subscriber.group_id
    if name is None:
        functions = ", ".join(call.name for call in subscriber.calls)
        raise SubscriberError(
            f"a subscriber in group {group} has no stable name for its keys: its functions are {functions}. {_TITLE}"
        )
    same_name = {subscriber, *(each for each in others if each.group_id == group and name_of(each) == name)}
    if len(same_name) > 1:
        raise SubscriberError(
            f"group {group} has {len(same_name)} subscribers named {name}; they would share keys and miss each other's "
            f"messages. {_TITLE}"
        )


def refuse_batches(subscriber: Any) -> None:
    """Check that a subscriber of a middleware with rules for errors does not consume batches.

    Raises:
        SubscriberError: It does, with a `group_id`.
    """
    if has_group(subscriber) and isinstance(subscriber, BatchSubscriber):
        raise SubscriberError(NO_BATCHES)


_TITLE: Final = 'Give each subscriber its own title: @broker.subscriber(…, title="charge-orders")'


def check_ack_policy(subscriber: Any) -> None:
    """Check that a subscriber acknowledges messages only after they are handled."""
    policy = getattr(subscriber, "ack_policy", None)
    if policy not in _SAFE:
        shown = policy.name if isinstance(policy, AckPolicy) else repr(policy)
        raise SubscriberError(
            f"a subscriber with AckPolicy.{shown} acknowledges messages before they are handled, so a crash loses "
            "them: set ack_policy=AckPolicy.NACK_ON_ERROR"
        )


def name_of(subscriber: Any) -> str | None:
    """Return the name of a subscriber in keys: its title, or else the name of its only function."""
    title: str | None = subscriber.specification.config.title_
    names: list[str] = [call.name for call in subscriber.calls]
    own = names[0] if len(names) == 1 and names[0].isidentifier() else None
    return title or own
