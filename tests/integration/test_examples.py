"""The billing and replay examples on real servers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path

import pytest
from dishka import Provider, Scope

from examples.billing import containers
from examples.billing.handlers import OrderPlaced
from examples.billing.payments import Audit, Payments
from examples.replay_dead_letters import dead_letters, replay
from integr8s_idem import BaseEvent, EventPublisher, Settings, load_settings
from integr8s_idem.runtime import ServiceGroup
from integr8s_idem.worker import ServiceReport
from tests.support.kafka import Kafka
from tests.support.replays import SECRET

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "examples" / "billing" / "settings.toml"


@pytest.fixture
def settings(kafka: Kafka, topic_prefix: str, redis_url: str) -> Settings:
    """Return the example's settings with the addresses of this test."""
    groups = {name: {"group_id": f"{topic_prefix}{name}"} for name in ("billing", "audit")}
    return load_settings(
        SETTINGS,
        overrides={
            "kafka": {"bootstrap_servers": kafka.bootstrap, "topic_prefix": topic_prefix},
            "store": {"url": redis_url},
            "replay": {"secret": SECRET},
            "services": groups,
            "telemetry": {"spans": "off", "metrics_enabled": False},
        },
    )


class Shop:
    """Both running services, with a payment service and an audit that the test can inspect."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.payments, self.audit = Payments(), Audit()
        services = [
            containers.billing.with_providers(_providing(Payments, self.payments)),
            containers.audit.with_providers(_providing(Audit, self.audit)),
        ]
        self._group = ServiceGroup(services, settings)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Shop]:
        """Run both services, and fail if one of them fails."""
        self._running = asyncio.create_task(self._group.run())
        try:
            yield self
        finally:
            self._group.stop()
            async with asyncio.timeout(30):
                assert await self._running == 0, self._group.reports()

    async def publish(self, *events: BaseEvent) -> None:
        publisher = EventPublisher(self._settings.kafka)
        for event in events:
            await publisher.publish(event)
        await publisher.close()

    async def until(self, condition: Callable[[dict[str, ServiceReport]], bool]) -> None:
        """Return once `condition` is true for the reports."""
        async with asyncio.timeout(60):
            while not condition({report.name: report for report in self._group.reports()}):
                await asyncio.wait({self._running}, timeout=0.05)
                assert not self._running.done(), self._group.reports()


def _providing(kind: type, made: object) -> Provider:
    provider = Provider(scope=Scope.APP)
    provider.provide(lambda: made, provides=kind)
    return provider


def order(number: int) -> OrderPlaced:
    return OrderPlaced(order_id=str(number), amount=Decimal("9.90"), aggregate_id=str(number))


@pytest.mark.kafka
async def test_billing_charges_once_on_a_redelivery(settings: Settings) -> None:
    placed = order(1)
    async with Shop(settings).open() as shop:
        await shop.publish(placed, placed)
        await shop.until(lambda now: now["billing"].tally.duplicates == 1 and now["audit"].tally.handled == 1)

        assert shop.payments.charges == [("1", Decimal("9.90"))]
        assert shop.audit.paid == {"1": "receipt-1"}


@pytest.mark.kafka
async def test_an_order_redelivered_after_a_restart_is_not_charged_again(settings: Settings) -> None:
    placed = order(2)
    async with Shop(settings).open() as shop:
        await shop.publish(placed)
        await shop.until(lambda now: now["billing"].tally.handled == 1)

    async with Shop(settings).open() as shop:
        await shop.publish(placed)
        await shop.until(lambda now: now["billing"].tally.duplicates == 1)

        assert shop.payments.charges == []


@pytest.mark.kafka
async def test_an_order_placed_from_another_terminal_is_charged_once(
    settings: Settings, kafka: Kafka, topic_prefix: str
) -> None:
    servers = {
        "INTEGR8S_IDEM_KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap,
        "INTEGR8S_IDEM_KAFKA__TOPIC_PREFIX": topic_prefix,
    }
    async with Shop(settings).open() as shop:
        command = [sys.executable, "-m", "examples.billing.place_order", "17"]
        placing = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env={**os.environ, **servers})

        assert await placing.wait() == 0
        await shop.until(lambda now: now["billing"].tally.duplicates == 1 and now["audit"].tally.handled == 1)
        assert shop.payments.charges == [("17", Decimal("9.90"))]


@pytest.mark.kafka
async def test_dead_letters_are_replayed_as_the_next_generation_and_other_messages_skipped(
    settings: Settings, topic_prefix: str
) -> None:
    source, publisher = f"{topic_prefix}order_placed", EventPublisher(settings.kafka)
    async with Shop(settings).open() as shop:
        await publisher.send(source, b"k", b"no event", [])
        await shop.until(lambda now: now["billing"].tally.dead_letters == 1)
        await publisher.send(f"{source}.dlq", b"k", b"by another program", [])

        assert await replay(settings, f"{source}.dlq", dry_run=True) == (1, 1)
        assert await replay(settings, f"{source}.dlq") == (1, 1)
        await shop.until(lambda now: now["billing"].tally.dead_letters == 2)
    await publisher.close()

    found = [message async for message in dead_letters(settings, f"{source}.dlq")]
    generations = [dict(message.headers).get("idempotency-dlq-generation") for message in found]
    assert generations == [b"0", None, b"1"]
    assert [message.value for message in found] == [b"no event", b"by another program", b"no event"]
