"""A nightly job that writes invoices and publishes an event for each, in one transaction, by an outbox.

`python -m examples.nightly_invoices` rolls back one run of the job and commits two, as if it had been started twice, on
a SQLite file and an embedded Kafka; each invoice is mailed once.  Needs the extras `embedded` and `sql`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

try:
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        raise SystemExit(f"this needs {error.name}: pip install '.[embedded,sql]' in the checkout") from None
    raise

from integr8s_idem import BaseEvent, EventRouter, Service, Settings
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.integrations.sqlalchemy import Outbox
from integr8s_idem.runtime import ServiceGroup, relay_outbox
from integr8s_idem.stores.sql import migrate, sql_engine
from integr8s_idem.worker import ServiceReport

ORDERS = (7, 8)


class InvoiceWritten(BaseEvent):
    event_type: Literal["invoice_written"] = "invoice_written"
    order: int


mails = EventRouter()


@mails.on(InvoiceWritten)
async def mail(event: InvoiceWritten) -> None:
    print(f"mail: invoice of order {event.order}")


service = Service(
    "mails",
    providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(mails)],
    background=[relay_outbox],  # without it, `integr8s-idem relay` would publish the outbox
)


async def nightly_job(engine: AsyncEngine, outbox: Outbox, *, fails: bool = False) -> None:
    """Write an invoice for each order."""
    async with AsyncSession(engine) as session, session.begin():
        async with outbox(session) as out:
            for order in ORDERS:
                await session.execute(text("INSERT INTO invoices VALUES (:number)"), {"number": order})
                # The same invoice has the same id, even if the job is repeated.
                out.publish(InvoiceWritten(order=order, aggregate_id=str(order)), id_from=f"invoice-{order}")
        if fails:
            raise OSError("the disk is full")


async def main() -> None:
    async with embedded() as servers:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings.model_validate(
                {
                    **servers.settings(),
                    "store": {"kind": "sqlite", "path": str(Path(folder) / "invoices.db")},
                    "telemetry": {"spans": "off", "metrics_enabled": False},
                }
            )
            await run(settings, f"sqlite+aiosqlite:///{folder}/invoices.db")


async def run(settings: Settings, url: str) -> None:
    """Run the job three times, then the service until it has settled all events."""
    engine, outbox = sql_engine(url), Outbox(settings, service="invoices")
    await migrate(engine)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE invoices (number INTEGER)"))
    try:
        await nightly_job(engine, outbox, fails=True)
    except OSError as error:
        print(f"job: {error}, nothing is published")
    for _ in range(2):
        await nightly_job(engine, outbox)
    await engine.dispose()
    group = ServiceGroup([service], settings)
    running = asyncio.create_task(group.run())
    while not (settled(group.reports()) or running.done()):
        await asyncio.wait({running}, timeout=0.05)
    for report in group.reports():
        print(f"{report.name}: {report.tally.handled} handled, {report.tally.duplicates} duplicates blocked")
    group.stop()
    await running


def settled(reports: Sequence[ServiceReport]) -> bool:
    """Whether both events of the two committed jobs are settled."""
    return sum(each.tally.handled + each.tally.duplicates for each in reports) == 2 * len(ORDERS)


if __name__ == "__main__":
    asyncio.run(main())
