"""Events with the id of another event, and invalid bytes in the store.

The broker is in memory.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import pytest
import redis

from integr8s_idem.config import IdempotencyConfig, RedisStoreSettings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import CorruptRecordError
from integr8s_idem.events import BaseEvent, encode_event
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.handlers.router import EventRouter
from integr8s_idem.keys import KeySpace
from integr8s_idem.stores.factory import open_store
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.kafka_protocols import Partition
from tests.fuzz.mutators import damaged
from tests.fuzz.stored import request, stored
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import guarded

pytestmark = pytest.mark.scenario(136)

SPACE = KeySpace("idempotency", "billing")


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    amount: int


@virtual_time
async def test_an_event_id_with_another_payload_is_rejected() -> None:
    charged: list[int] = []
    router, broker = EventRouter(), FakeBroker()

    @router.on(OrderPlaced, name="charge")
    async def charge(event: OrderPlaced) -> None:
        charged.append(event.amount)

    for amount in (1, 1_000):
        broker.put("order_placed", encode_event(OrderPlaced(event_id="e-1", amount=amount)))
    async with running(IdempotentEventDispatcher(router, guarded().manager), broker) as worker:
        await worker.until(lambda: broker.committed.get(Partition("order_placed", 0)) == 2)

    assert charged == [1]
    [dead_letter] = broker.logs[Partition("order_placed.dlq", 0)]
    assert dict(dead_letter.headers)["idempotency-dlq-reason"] == b"key_reused"


@pytest.mark.parametrize("seed", range(20))
async def test_invalid_bytes_in_the_store_prevent_the_work(redis_url: str, seed: int) -> None:
    random = Random(seed)
    junk = random.randbytes(40) if seed % 2 else damaged(random, stored(random, request(random)))
    full = SPACE.full(SPACE.key("order:1"))
    with redis.Redis.from_url(redis_url) as other_program:
        other_program.set(full, b"\3" + junk)
        ran: list[Any] = []

        async def charge() -> None:
            ran.append(1)

        async with open_store(RedisStoreSettings(url=redis_url), key_prefix="idempotency") as store:
            manager = IdempotencyManager(IdempotencyConfig(), store, scope="billing")
            with pytest.raises(CorruptRecordError):
                await manager.run("order:1", charge)
        assert not ran
        assert other_program.get(full) == b"\3" + junk
