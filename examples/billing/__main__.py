"""Run both services on embedded servers with one order that is delivered twice: `python -m examples.billing`.

Requires the extra `embedded`.  Shows the charge and the blocked duplicate, and exits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from decimal import Decimal

from integr8s_idem import EventPublisher, Settings, load_settings
from integr8s_idem.embedded import embedded
from integr8s_idem.runtime import ServiceGroup
from integr8s_idem.worker import ServiceReport

from .handlers import OrderPlaced
from .place_order import SETTINGS
from .workers import platform


async def main() -> None:
    async with embedded() as servers:
        # Works without a span collector and without a free port for metrics.
        quiet = {"telemetry": {"spans": "off", "metrics_enabled": False}}
        settings = load_settings(SETTINGS, overrides={**servers.settings(), **quiet})
        await order_twice(settings)
        group = ServiceGroup(platform.choose(), settings)
        running = asyncio.create_task(group.run())
        while not (settled(group.reports()) or running.done()):
            await asyncio.wait({running}, timeout=0.05)
        for report in group.reports():
            print(f"{report.name}: {report.tally.handled} handled, {report.tally.duplicates} duplicates blocked")
        group.stop()
        await running


async def order_twice(settings: Settings) -> None:
    """Publish the same event twice."""
    publisher = EventPublisher(settings.kafka)
    order = OrderPlaced(order_id="1", amount=Decimal("9.90"), aggregate_id="1")
    try:
        await publisher.publish(order)
        await publisher.publish(order)
    finally:
        await publisher.close()


def settled(reports: Sequence[ServiceReport]) -> bool:
    """Return whether billing has settled both deliveries and audit has handled the payment."""
    seen = {report.name: report.tally for report in reports}
    return seen["billing"].handled + seen["billing"].duplicates == 2 and seen["audit"].handled == 1


if __name__ == "__main__":
    asyncio.run(main())
