"""Harnesses and platforms: what they say about arguments of another type."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from integr8s_idem import Service, Settings
from integr8s_idem.embedded import EmbeddedServers
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.runtime import Platform
from integr8s_idem.testing import EmbeddedHarness, WorkerHarness
from tests.unit.testing.test_harness_limits import router

SERVERS = EmbeddedServers(bootstrap_servers="127.0.0.1:1", redis_url="redis://127.0.0.1:1")

stock = Service("stock", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])


def test_a_platform_says_that_it_takes_services() -> None:
    with pytest.raises(ApplicationError, match=re.escape('Platform(Service("billing", …)), not str')):
        Platform(cast("Any", "x"))


@pytest.mark.parametrize(
    "harness",
    [lambda given: WorkerHarness(given, "stock"), lambda given: EmbeddedHarness(given, "stock", servers=SERVERS)],
    ids=["worker", "embedded"],
)
def test_a_harness_says_that_it_takes_a_platform_or_a_service(harness: Callable[[Any], object]) -> None:
    with pytest.raises(ApplicationError, match="Harness takes a Platform or a Service, not str"):
        harness("stock")


async def test_a_harness_says_that_it_delivers_events() -> None:
    async with WorkerHarness(stock, settings=Settings()) as harness:
        for call in (harness.publish, harness.redeliver):
            with pytest.raises(ApplicationError, match=r"takes events, instances .* of BaseEvent .*, not str"):
                await call(cast("Any", "x"))
        with pytest.raises(ApplicationError, match=r"takes events, instances .* of BaseEvent .*, not type"):
            harness.send(cast("Any", str))


async def test_an_embedded_harness_says_that_it_publishes_events() -> None:
    harness = EmbeddedHarness(stock, servers=SERVERS)

    with pytest.raises(ApplicationError, match=r"takes events, instances .* of BaseEvent .*, not str"):
        await harness.publish(cast("Any", "x"))
