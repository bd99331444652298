"""A worker with the background tasks of its service."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from integr8s_idem.config.sections import KafkaSettings, ServiceSettings
from integr8s_idem.runtime.background import run_worker
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker import ServiceWorker
from tests.support.fake_consumer import FakeBroker, FakeConsumer
from tests.support.fake_worker import FakePublisher
from tests.support.pipelines import Depot, dispatcher_of


class Panic(BaseException):
    """As the panics of Rust extensions."""


@pytest.mark.parametrize(
    "error", [Panic(), ValueError(), asyncio.CancelledError()], ids=lambda each: type(each).__name__
)
@virtual_time
async def test_the_error_of_a_background_task_is_raised(error: BaseException) -> None:
    async def watch() -> None:
        await asyncio.sleep(5)
        raise error

    broker, kafka = FakeBroker(), KafkaSettings()
    publisher = FakePublisher(broker)
    dispatcher = dispatcher_of(Depot().handle)
    worker = ServiceWorker(
        "billing",
        dispatcher,
        publisher,
        kafka,
        ServiceSettings(),
        consumer=cast(Any, lambda settings, group: FakeConsumer(broker)),
    )

    with pytest.raises(type(error)):
        await asyncio.wait_for(run_worker(worker, dispatcher, publisher, kafka, [watch()]), 60)
