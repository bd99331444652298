"""A shop on FastStream, for tests of the middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker

from integr8s_idem.errors import PermanentError
from integr8s_idem.failures import FailureRule
from integr8s_idem.integrations.faststream import IdempotencyMiddleware, by_header
from integr8s_idem.records import IdempotencyStatus
from tests.support.guarded import Guarded, guarded


class Shop:
    """A broker with one guarded subscriber, and the recorded effects."""

    def __init__(
        self, *, accepts_given_up: bool = True, failures: Sequence[FailureRule] | None = None, **config: Any
    ) -> None:
        self.here: Guarded = guarded(**config)
        self.given_up: list[str] = []
        self.runs: list[Any] = []
        self.sent: list[tuple[Any, dict[str, str]]] = []
        self.settled: list[str] = []
        """How each order was settled: "ack", or the name of FastStream's exception."""
        self.guard = IdempotencyMiddleware(
            self.here.manager,
            key=by_header("event_id"),
            given_up=self._give_up if accepts_given_up else None,
            failures=failures,
        )
        self.given_up_error: Exception | None = None
        self.broker = KafkaBroker(middlewares=[self.guard])

    async def _give_up(self, record: Any, error: Exception) -> None:
        if self.given_up_error is not None:
            raise self.given_up_error
        self.given_up.append(repr(error))

    def add_subscriber(self, answer: Any, *, batch: bool = False) -> None:
        """Add a subscriber that answers every order with `answer`."""

        async def charge(order: dict[str, str]) -> Any:
            self.runs.append(order)
            return answer

        publisher: Any = self.broker.publisher("receipts", batch=batch)
        self.broker.subscriber("orders", group_id="billing", ack_policy=AckPolicy.NACK_ON_ERROR)(publisher(charge))

    def before_publishing(self, publish: Callable[[], Awaitable[None]]) -> None:
        """Await `publish` before each answer is sent."""
        shop = self

        class Within(BaseMiddleware[Any, Any]):
            async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
                if cmd.destination == "receipts":
                    await publish()
                    shop.sent.append((cmd.body, dict(cmd.headers)))
                return await call_next(cmd)

        class Outside(BaseMiddleware[Any, Any]):
            async def after_processed(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> bool:
                if getattr(self.msg, "topic", "orders") == "orders":
                    shop.settled.append("ack" if exc_type is None else exc_type.__name__)
                return False

        self.broker.insert_middleware(Outside)
        self.broker.add_middleware(Within)

    def add_failing_subscriber(
        self,
        *,
        policy: AckPolicy = AckPolicy.NACK_ON_ERROR,
        batch: bool = False,
        error: BaseException = PermanentError("no such card"),  # noqa: B008  # it is not changed
    ) -> None:
        """Add a subscriber that fails every order."""

        async def charge(order: Any) -> None:
            self.runs.append(order)
            raise error

        self.broker.subscriber("orders", group_id="billing", ack_policy=policy, batch=batch)(charge)

    async def place(self, event_id: str = "e-1", order: str = "7") -> None:
        await self.broker.publish({"order": order}, "orders", headers={"event_id": event_id})

    async def statuses(self) -> list[IdempotencyStatus]:
        return [record.status async for record in self.here.store.scan("")]


async def nothing() -> None:
    """Do nothing, for `before_publishing`."""
