"""A worker with a broker in memory and a real Redis, for faults of the store.

Worker, dispatcher, manager, store, driver and Redis are real. In `tests.support.workers` the broker is real, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from redis.asyncio import Redis

from integr8s_idem import EventRouter, IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.config import RedisStoreSettings
from integr8s_idem.engine.work import Attempt
from integr8s_idem.handlers.handler_calls import HandlerCall, RegisteredHandler
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.redis import RedisIdempotencyRepository, redis_client
from integr8s_idem.telemetry import Signal
from integr8s_idem.worker.kafka_protocols import Partition
from tests.campaigns.figures import Figures
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.effects import Effects
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import FakePublisher, RunningWorker, running
from tests.support.fault_proxy import Address
from tests.support.redis import url_of
from tests.support.workers import OrderPlaced, orders

TOPIC: Final = Partition("order_placed", 0)
DEAD: Final = "order_placed.dlq"
QUICK: Final[dict[str, Any]] = {
    "retry_initial_seconds": 0.05,
    "retry_max_seconds": 0.2,
    "commit_interval_seconds": 0.05,
    "drain_timeout_seconds": 5,
    "ordering": "none",
}
"""Settings with short intervals, so that tests do not have to wait."""

Behavior = Callable[[OrderPlaced, Attempt], Awaitable[Any]]


@dataclass
class RedisShop:
    """A worker, the events that it consumes, and their effects."""

    broker: FakeBroker
    effects: Effects
    observer: CountingObserver
    manager: IdempotencyManager
    store: IdempotencyRepository
    worker: RunningWorker
    published: list[OrderPlaced] = field(default_factory=list)

    @property
    def tally(self) -> Any:
        return self.worker.worker.report().tally

    @property
    def state(self) -> str:
        return self.worker.worker.report().state

    @property
    def reason(self) -> str:
        return self.worker.worker.health().reason

    def publish(self, *events: OrderPlaced) -> None:
        """Deliver events, also repeatedly."""
        self.published += events
        self.broker.publish(*events)

    def order(self, count: int) -> list[OrderPlaced]:
        """Deliver new orders with consecutive numbers."""
        known = len({event.order_id for event in self.published})
        new = orders(known + count)[known:]
        self.publish(*new)
        return new

    async def paused(self) -> str:
        """Return the reason once the gate is closed."""
        await eventually(lambda: self.state == "paused", state=self.worker.worker.report)
        return self.reason

    async def settled(self) -> None:
        """Return once all deliveries are acknowledged."""
        await eventually(lambda: self.acknowledged == len(self.broker.logs[TOPIC]), state=self.snapshot)

    @property
    def acknowledged(self) -> int:
        return self.broker.committed.get(TOPIC, 0)

    def snapshot(self) -> object:
        return self.worker.worker.report(), self.observer.counts, self.worker.task

    def attempts(self, order_id: str = "0") -> list[int]:
        """Return the attempts with an effect."""
        return [line.attempt for line in self.effects.lines() if line.what == "effect" and line.work == order_id]

    def judge(self, *, records_lost: bool = False) -> Figures:
        """Call `Effects.judge` with the orders in the dead-letter topic as given up."""
        given_up = {self._order_of(record.value) for record in self.broker.values(DEAD)}
        published = {event.order_id for event in self.published}
        return self.effects.judge(published, given_up=given_up, records_lost=records_lost)

    def untouched(self) -> None:
        """Assert that an outage left no traces: no counted attempt, no dead letter, one run per order."""
        assert self.broker.values(DEAD) == []
        assert (self.tally.retries, self.observer.counts[Signal.TAKEOVER]) == (0, 0)
        assert {line.attempt for line in self.effects.lines()} <= {1}
        assert self.judge()["repeats"] == 0

    @staticmethod
    def _order_of(value: bytes | None) -> str:
        return OrderPlaced.model_validate_json(value or b"").order_id


@asynccontextmanager
async def open_redis_shop(
    effects: Effects,
    address: Address | IdempotencyRepository,
    *,
    lease: float = 10.0,
    timeout: float = 0.5,
    behave: Behavior | None = None,
    broker: FakeBroker | None = None,
    store: dict[str, Any] | None = None,
    service: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[RedisShop]:
    """Run a worker.

    Args:
        address: Address of Redis or of a proxy; or the store itself.
        lease: Seconds.
        timeout: Timeout of store calls in seconds.
        behave: Called by the handler before its effect; nothing by default.
        store: Additional settings in `[store]`.
        service: Additional settings of the service.
        config: Additional settings in `[idempotency]`.
    """
    effects.prepare()
    broker = broker or FakeBroker()
    broker.logs.setdefault(TOPIC, [])
    async with AsyncExitStack() as stack:
        repository: IdempotencyRepository
        if isinstance(address, IdempotencyRepository):
            repository = address
        else:
            client = make_client(address, timeout, **(store or {}))
            stack.push_async_callback(client.aclose)
            repository = RedisIdempotencyRepository(client, timeout=timedelta(seconds=timeout))
        settings = IdempotencyConfig.model_validate({"processing_timeout_seconds": lease, **config})
        observer = CountingObserver()
        manager = IdempotencyManager(settings, repository, observer, scope="billing")
        stack.push_async_callback(manager.close)
        dispatcher = _dispatcher(manager, effects, behave)
        worker = await stack.enter_async_context(
            running(dispatcher, broker, FakePublisher(broker), **{**QUICK, **(service or {})})
        )
        yield RedisShop(broker, effects, observer, manager, repository, worker)


def make_client(address: Address, timeout: float, **settings: Any) -> Redis:
    """Create a client like that of a service."""
    return redis_client(
        RedisStoreSettings.model_validate({"url": url_of(address), "timeout_seconds": timeout, **settings})
    )


def _dispatcher(manager: IdempotencyManager, effects: Effects, behave: Behavior | None) -> IdempotentEventDispatcher:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        """Replaced by `invoke`, which gets the attempt without a container."""

    async def invoke(_: RegisteredHandler, call: HandlerCall) -> str:
        event = call.event
        assert isinstance(event, OrderPlaced)
        effects.note("begin", event.order_id, call.attempt)
        if behave is not None:
            await behave(event, call.attempt)
        effects.apply(event.order_id, call.attempt)
        effects.note("end", event.order_id, call.attempt)
        return f"receipt-{event.order_id}"

    return IdempotentEventDispatcher(router, manager, invoke=invoke)


async def crash(shop: RedisShop) -> None:
    """Simulate the crash of the worker for broker and store; add a `HalfOpen` fault to the proxy first."""
    await asyncio.wait_for(shop.worker.crash(), 10)


class Held:
    """A behavior that makes handlers wait until they are released."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.may_go_on = asyncio.Event()

    async def __call__(self, event: OrderPlaced, attempt: Attempt) -> None:
        self.began.append(event.order_id)
        await self.may_go_on.wait()


async def briefly(event: OrderPlaced, attempt: Attempt) -> None:
    await asyncio.sleep(0.02)
