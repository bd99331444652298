"""A worker on a broker in memory, with its records in a real Redis: for faults of the store.

The broker is in memory since it is not what misbehaves here: worker, dispatcher, manager, store and driver
are the real ones, and so is the server.  `tests.support.workers` has both servers real.
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
from integr8s_idem.handlers.router import HandlerCall, RegisteredHandler
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
"""A service that does not keep a test waiting."""

Behaviour = Callable[[OrderPlaced, Attempt], Awaitable[Any]]


@dataclass
class RedisShop:
    """One worker, what it consumes, and what came of it."""

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
        """Deliver events, again if they were delivered before."""
        self.published += events
        self.broker.publish(*events)

    def order(self, count: int) -> list[OrderPlaced]:
        """Deliver new orders, numbered on."""
        known = len({event.order_id for event in self.published})
        new = orders(known + count)[known:]
        self.publish(*new)
        return new

    async def paused(self) -> str:
        """Return once the gate is closed: with the reason for it."""
        await eventually(lambda: self.state == "paused", state=self.worker.worker.report)
        return self.reason

    async def settled(self) -> None:
        """Return once everything is acknowledged."""
        await eventually(lambda: self.acknowledged == len(self.broker.logs[TOPIC]), state=self.snapshot)

    @property
    def acknowledged(self) -> int:
        return self.broker.committed.get(TOPIC, 0)

    def snapshot(self) -> object:
        return self.worker.worker.report(), self.observer.counts, self.worker.task

    def attempts(self, order_id: str = "0") -> list[int]:
        """The attempts whose effect happened."""
        return [line.attempt for line in self.effects.lines() if line.what == "effect" and line.work == order_id]

    def judge(self, *, records_lost: bool = False) -> Figures:
        """As `Effects.judge`; orders in the dead-letter topic have been given up."""
        letters = {self._order_of(record.value) for record in self.broker.values(DEAD)}
        asked_for = {event.order_id for event in self.published}
        return self.effects.judge(asked_for, given_up=letters, records_lost=records_lost)

    def untouched(self) -> None:
        """What an outage leaves: no attempt counted, no dead letter, each order handled by its first run alone."""
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
    behave: Behaviour | None = None,
    broker: FakeBroker | None = None,
    store: dict[str, Any] | None = None,
    service: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[RedisShop]:
    """A running worker.

    Args:
        address: Of Redis or of a proxy before it; or the whole store.
        lease: Seconds.
        timeout: Longest wait for one call of the store, in seconds.
        behave: What its handler does before its effect; nothing if not given.
        store: More of `[store]`.
        service: More of the service's settings.
        config: More of `[idempotency]`.
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
    """A client as a service has it."""
    return redis_client(
        RedisStoreSettings.model_validate({"url": url_of(address), "timeout_seconds": timeout, **settings})
    )


def _dispatcher(manager: IdempotencyManager, effects: Effects, behave: Behaviour | None) -> IdempotentEventDispatcher:
    router = EventRouter()

    @router.on(OrderPlaced)
    async def charge(event: OrderPlaced) -> None:
        """`invoke` stands in for it, since that is told the attempt without a container."""

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
    """Its process is gone, as far as broker and store can tell: put the proxy's `HalfOpen` before it."""
    await asyncio.wait_for(shop.worker.crash(), 10)


class Held:
    """Handlers that wait until they may go on."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.may_go_on = asyncio.Event()

    async def __call__(self, event: OrderPlaced, attempt: Attempt) -> None:
        self.began.append(event.order_id)
        await self.may_go_on.wait()


async def briefly(event: OrderPlaced, attempt: Attempt) -> None:
    await asyncio.sleep(0.02)
