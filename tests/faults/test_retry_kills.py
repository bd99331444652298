"""Workers that are killed between two steps of a delayed retry."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import pytest

from tests.crashes.retrying import POINTS, Trial
from tests.support.kafka.broker import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(400)]

CONCURRENT: Final = 4


@pytest.mark.scenario(145)
async def test_no_event_is_lost_or_silently_repeated_wherever_a_worker_dies(kafka: Kafka, redis_url: str) -> None:
    slots, figures = asyncio.Semaphore(CONCURRENT), Counter[str]()

    async def run(number: int) -> None:
        async with slots:
            figures.update(await Trial(kafka, redis_url, number).run())

    async with asyncio.TaskGroup() as group:
        for number in range(len(POINTS)):
            group.create_task(run(number))

    assert figures["kills"] >= len(POINTS) - 2, figures
