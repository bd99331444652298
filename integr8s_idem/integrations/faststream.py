"""FastStream middleware that makes Kafka subscribers handle each message once.

    broker = KafkaBroker(…, middlewares=[IdempotencyMiddleware(manager, key=by_header("event_id"))])

    @broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)
    @broker.publisher("receipts")
    async def charge(order: Order) -> Receipt: ...

The record of a message is completed after the handler has returned, its Dishka scope has closed (the business commit)
and `@publisher` has sent its messages, and before FastStream acknowledges the message.  A duplicate does not reach the
handler: the middleware returns the result of the first run, so that `@publisher` sends messages that may be missing.

Messages that `@publisher` sends without an `event_id` header get one that is derived from the key of the message they
answer.  While the broker does not accept them, the middleware keeps retrying: the handler has succeeded and does not
run again.

After a failure the middleware pauses and rejects the message with a negative acknowledgment, so that it is
redelivered under every acknowledgment policy.  Messages that are given up are acknowledged once the `given_up` function
has accepted them; without that function they are redelivered and block their partition.  Subscribers with
`AckPolicy.ACK_FIRST`, FastStream's default for Kafka, are rejected because it acknowledges messages before they are
handled.  Subscribers without a `group_id` are not guarded: nothing is redelivered to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.config.message_text import lacking
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import ApplicationError
from integr8s_idem.failures import FailureRule
from integr8s_idem.integrations.kafka_loops import KeyOf, by_header, by_position, policy_of

try:
    from integr8s_idem.integrations.faststream_guard import GivenUp, GuardSettings, MessageGuard
    from integr8s_idem.integrations.faststream_subscribers import SubscriberError, check_subscriber, refuse_batches
except ModuleNotFoundError as error:
    raise ApplicationError(lacking(__name__, "faststream", error)) from error

__all__ = ["IdempotencyMiddleware", "SubscriberError", "by_header", "by_position"]


class IdempotencyMiddleware:
    """Middleware that guards all subscribers of a broker."""

    def __init__(
        self,
        manager: IdempotencyManager,
        *,
        key: KeyOf = by_position,
        ttl: Duration | None = None,
        given_up: GivenUp | None = None,
        failures: Iterable[FailureRule] | None = None,
    ) -> None:
        """
        Args:
            manager: Guards the messages; its scope names the service.
            key: Returns the key of a record; see `by_header` and `by_position`.
            ttl: How long an outcome is kept, by the store's clock.  Choose it longer than the retention of the topic.
            given_up: Async function that accepts records which cannot be handled or have failed permanently; they are
                acknowledged afterwards.  Without it they are redelivered and block their partition.
            failures: Rules for errors of handlers, without pauses of their own, and before the default ones; see
                `integr8s_idem.failures`.  Without them, each error is retried, except `PermanentError`.  They do not
                apply to batches: subscribers with `batch=True` are rejected.

        Raises:
            ApplicationError: A rule has a pause of its own.
        """
        self._settings = GuardSettings(manager, key, duration(ttl, "ttl"), given_up, policy_of(failures))

    def __call__(self, msg: Any, /, *, context: Any) -> MessageGuard:
        return MessageGuard(self._settings, msg, context=context)

    def check(self, broker: Any) -> None:
        """Check all subscribers of a broker.  Call it at startup: `app.on_startup(lambda: guard.check(broker))`.

        Raises:
            SubscriberError: A subscriber acknowledges messages before they are handled, or manually; or it has no
                stable name, or the name of another subscriber of its group.  One of another broker is found at the
                first message.
        """
        for subscriber in broker.subscribers:
            check_subscriber(subscriber, broker.subscribers)
            if self._settings.policy is not None:
                refuse_batches(subscriber)
