"""Run the service while orders come in steadily, and measure how many are charged, and how many wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from examples.retries.payments import ChargeRequested, Gateway, Retries
from examples.retries.service import DELAY_SECONDS, platform_with
from integr8s_idem import EventPublisher, Settings
from integr8s_idem.embedded import EmbeddedServers
from integr8s_idem.runtime import ServiceGroup

RATE = 100
"""Orders per second."""
INTERVAL = 0.1
"""Seconds between two samples."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The orders at one moment."""

    seconds: float
    """Since the first order."""
    charged: int
    waiting: int
    """Requested, but not charged yet."""


@dataclass(slots=True)
class Measurement:
    """What happened with one kind of retries."""

    retries: Retries
    samples: list[Sample] = field(default_factory=list)

    @property
    def throughput(self) -> list[tuple[float, float]]:
        """Charges per second, between each sample and the one a second earlier."""
        step = round(1 / INTERVAL)
        pairs = zip(self.samples, self.samples[step:], strict=False)
        return [
            (late.seconds, (late.charged - early.charged) / (late.seconds - early.seconds)) for early, late in pairs
        ]

    @property
    def lag(self) -> list[tuple[float, float]]:
        """Orders that wait."""
        return [(sample.seconds, sample.waiting) for sample in self.samples]


async def measure(servers: EmbeddedServers, retries: Retries, seconds: float) -> Measurement:
    """Request charges for `seconds`, and measure until all orders are charged."""
    settings = Settings.model_validate(
        {
            **servers.settings(),
            "services": {retries: {"retry_topics": [f"{DELAY_SECONDS}s"]} if retries == "overtake" else {}},
            "telemetry": {"spans": "off", "metrics_enabled": False},
        }
    )
    gateway, found = Gateway(), Measurement(retries)
    group = ServiceGroup(platform_with(gateway, retries).choose(), settings)
    publisher = EventPublisher(settings.kafka)
    running = asyncio.create_task(group.run())
    requested, total = 0, round(RATE * seconds)
    began = asyncio.get_running_loop().time()
    while len(gateway.charged) < total and not running.done():
        passed = asyncio.get_running_loop().time() - began
        due = min(total, round(RATE * passed))
        numbers = range(requested + 1, due + 1)
        await publisher.publish(*(ChargeRequested(number=number, aggregate_id=str(number)) for number in numbers))
        requested = max(requested, due)
        found.samples.append(Sample(passed, len(gateway.charged), requested - len(gateway.charged)))
        await asyncio.wait({running}, timeout=INTERVAL)
    passed = asyncio.get_running_loop().time() - began
    found.samples.append(Sample(passed, len(gateway.charged), requested - len(gateway.charged)))
    group.stop()
    await running
    await publisher.close()
    return found
