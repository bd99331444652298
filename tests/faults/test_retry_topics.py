"""Faults while copies of events wait in retry topics, on a real Kafka and a real Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem.diagnostics import Code, Finding
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.worker.assignments import AbandonedError, Delivery
from integr8s_idem.worker.retries import Retries
from tests.kafka_faults import servers
from tests.kafka_faults.tools import need_kafka
from tests.support.conditions import eventually
from tests.support.doctor import found_in
from tests.support.kafka.broker import Kafka, KafkaBroker
from tests.support.retries import TIERS, Flaky, create_retry_topics, group_of, is_idle, retry_topic, settings
from tests.support.workers import Shop, open_shop, orders

pytestmark = pytest.mark.kafka


@pytest.fixture
async def shop(kafka: Kafka, topic_prefix: str, redis_url: str) -> AsyncIterator[Shop]:
    async with open_shop(kafka, topic_prefix, redis_url) as shop:
        yield shop


class StallsBroker(Flaky):
    """Stalls the broker before its second failure, so that the copy cannot be confirmed."""

    broker: KafkaBroker

    def fail(self) -> None:
        if len(self.attempts) == 2:
            os.kill(self.broker.pid, signal.SIGSTOP)
        super().fail()


@pytest.fixture
async def broker() -> AsyncIterator[KafkaBroker]:
    need_kafka(own=True)
    broker = await asyncio.to_thread(servers.own_broker)
    yield broker
    await asyncio.to_thread(broker.kill)


@pytest.mark.slow
@pytest.mark.scenario(149)
async def test_a_crash_of_the_broker_only_delays_copies_that_wait_or_are_being_published(
    broker: KafkaBroker, topic_prefix: str, redis_url: str
) -> None:
    async with open_shop(broker, topic_prefix, redis_url) as shop:
        await create_retry_topics(shop, *TIERS)
        flaky = StallsBroker(shop, 5, "0", "1")
        flaky.broker = broker
        quick = shop.settings.model_copy(update={"request_timeout_seconds": 1})
        worker = await shop.worker(flaky.router(), service=settings(*TIERS), kafka=quick)
        waiting, failing = orders(2)
        await shop.deliver(waiting)
        await eventually(lambda: worker.tally.deferred == 1, state=worker.worker.report)
        await shop.deliver(failing)
        await eventually(lambda: len(flaky.attempts) == 2, state=worker.worker.report)

        await asyncio.to_thread(broker.kill)
        await asyncio.to_thread(broker.start)
        await eventually(lambda: len(shop.charged) == 2 and is_idle(worker), state=lambda: shop.charged)

        assert sorted(shop.charged) == ["0", "1"]
        assert min(map(flaky.pause, shop.charged)) >= 5
        assert sorted(flaky.numbers) == [1, 1, 2, 2]
        assert (await shop.committed(), worker.tally.dead_letters) == (2, 0)


@pytest.mark.scenario(150)
async def test_a_rollback_in_the_middle_of_retries_strands_copies_that_the_doctor_reports_and_loses_nothing(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create_retry_topics(shop, *TIERS)
    flaky = Flaky(shop, 1.9, "0", "1")
    copied, uncopied = orders(2)
    new = await shop.worker(flaky.router(), service=settings(*TIERS))
    await shop.deliver(copied)
    await eventually(lambda: new.tally.deferred == 1, state=new.worker.report)
    with monkeypatch.context() as patched:
        patched.setattr(Retries, "publish", _abandoned)
        await shop.deliver(uncopied)
        await eventually(lambda: len(flaky.attempts) == 2, state=new.worker.report)
        await new.stop()
    assert await shop.committed() == 1

    old = await shop.worker(flaky.router("block"))
    await eventually(lambda: shop.charged == ["1"] and is_idle(old), state=old.worker.report)
    assert flaky.pause("1") >= 1.9
    assert (await shop.committed(), old.tally.dead_letters) == (2, 0)
    stranded = [finding.where for finding in await _doctor(shop, tmp_path) if finding.code is Code.RETRY_TOPIC_RETIRED]
    assert f"topic {retry_topic(shop, '2s')}" in stranded
    await old.stop()

    again = await shop.worker(flaky.router(), service=settings(*TIERS))
    await eventually(lambda: shop.charged == ["1", "0"] and is_idle(again), state=again.worker.report)

    assert flaky.numbers == [1, 1, 2, 2]


async def _abandoned(self: Retries, delivery: Delivery, *_: Any) -> bool:
    """Publish nothing, as a worker that ends between the record and the copy."""
    await delivery.assignment.closing
    raise AbandonedError


async def _doctor(shop: Shop, folder: Path) -> list[Finding]:
    return await found_in(
        f'[kafka]\nbootstrap_servers = "{shop.kafka.bootstrap}"\ntopic_prefix = "{shop.settings.topic_prefix}"\n'
        f'[services.billing]\ntopics = ["{shop.topic}"]\ngroup_id = "{group_of(shop)}"\n[store]\nkind = "memory"\n',
        folder,
    )


@pytest.mark.scenario(148)
async def test_a_copy_whose_record_has_expired_continues_with_the_next_attempt(shop: Shop) -> None:
    await create_retry_topics(shop, *TIERS)
    shop.lease = 0.3  # a record of unsettled work is kept for the ttl, at least for ten leases
    flaky, [order] = Flaky(shop, 0.5, "0"), orders(1)
    first = await shop.worker(flaky.router(), service=settings(*TIERS), default_ttl_seconds=1)
    await shop.deliver(order)
    await eventually(lambda: first.tally.deferred == 1, state=first.worker.report)
    await first.stop()
    manager, key = shop.manager(), KeyResolver().resolve("charge", order).key
    while await manager.get(key) is not None:  # noqa: ASYNC110  # the store sends no notification
        await asyncio.sleep(0.05)

    second = await shop.worker(flaky.router(), service=settings(*TIERS), default_ttl_seconds=1)
    await eventually(lambda: shop.charged == ["0"] and is_idle(second), state=second.worker.report)

    assert flaky.numbers == [1, 2]
    assert second.tally.reruns == 1
