"""A shop whose orders wait for retries in retry topics."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final

from integr8s_idem import EventRouter
from integr8s_idem._util.context_vars import RUN
from integr8s_idem.config import ServiceSettings
from integr8s_idem.errors import RetryAfter
from integr8s_idem.handlers.router import DelayedRetries
from tests.support.workers import QUICK, OrderPlaced, Shop, WorkerInTest

TIERS: Final = ("2s", "1m")


def settings(*tiers: str, **changes: object) -> ServiceSettings:
    """Return the settings of a service with these retry topics."""
    return ServiceSettings.model_validate({**QUICK.model_dump(), "retry_topics": tiers, **changes})


def group_of(shop: Shop) -> str:
    return shop.settings.topic_prefix + shop.group


def retry_topic(shop: Shop, tier: str) -> str:
    return f"{shop.topic}.{group_of(shop)}.retry.{tier}"


async def create_retry_topics(shop: Shop, *tiers: str) -> None:
    await shop.kafka.create_topics({retry_topic(shop, tier): 2 for tier in tiers})


class Flaky:
    """A handler whose first attempts at some orders ask for a later retry."""

    def __init__(self, shop: Shop, delay: float, *flaky: str) -> None:
        self.attempts: list[tuple[str, float]] = []
        """Orders, with the time of the monotonic clock."""
        self.numbers: list[int] = []
        """The number of each attempt."""
        self._shop = shop
        self._delay = timedelta(seconds=delay)
        self._flaky = set(flaky)

    async def charge(self, event: OrderPlaced) -> None:
        run = RUN.get()
        assert run is not None
        self.attempts.append((event.order_id, time.monotonic()))
        self.numbers.append(run.attempt.number)
        if event.order_id in self._flaky:
            self._flaky.remove(event.order_id)
            self.fail()
        self._shop.charged.append(event.order_id)

    def fail(self) -> None:
        raise RetryAfter(self._delay)

    def router(self, delayed_retries: DelayedRetries = "overtake") -> EventRouter:
        router = EventRouter()
        router.on(OrderPlaced, delayed_retries=delayed_retries)(self.charge)
        return router

    def pause(self, order: str) -> float:
        """Return the seconds between the two attempts at an order."""
        first, second = (at for each, at in self.attempts if each == order)
        return second - first


def is_idle(worker: WorkerInTest) -> bool:
    report = worker.worker.report()
    return report.in_flight == 0 and report.lag == 0
