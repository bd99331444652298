"""A transactional handler: its writes, its outgoing events and its outcome are committed together.

`python -m examples.bookings` delivers one payment twice, on a SQLite file and an embedded Kafka; a second
booking would show in the balance.  Needs the extras `embedded` and `sql`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

from dishka import FromDishka, Provider, Scope, provide

try:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
except ModuleNotFoundError as error:
    if __name__ == "__main__":
        raise SystemExit(f"this needs {error.name}: pip install '.[embedded,sql]' in the checkout") from None
    raise

from integr8s_idem import BaseEvent, EventPublisher, EventRouter, Outgoing, Platform, Service, Settings
from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.embedded import embedded
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.runtime import ServiceGroup
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.worker import ServiceReport


class PaymentReceived(BaseEvent):
    event_type: Literal["payment_received"] = "payment_received"
    account: str
    amount: int


class BalanceChanged(BaseEvent):
    event_type: Literal["balance_changed"] = "balance_changed"
    account: str
    balance: int


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "accounts"
    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]


bookings, mails = EventRouter(), EventRouter()


@bookings.on(PaymentReceived)
async def book(event: PaymentReceived, session: FromDishka[AsyncSession], outgoing: FromDishka[Outgoing]) -> int:
    account = await session.get(Account, event.account) or Account(name=event.account, balance=0)
    account.balance += event.amount
    session.add(account)
    outgoing.publish(BalanceChanged(account=account.name, balance=account.balance))
    return account.balance


@mails.on(BalanceChanged)
async def mail(event: BalanceChanged) -> None:
    print(f"mail: account {event.account} has {event.balance}")


class DatabaseProvider(Provider):
    """Provides the application's engine, and a session for each event that is committed after its `yield`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    @provide(scope=Scope.APP)
    async def engine(self) -> AsyncGenerator[AsyncEngine, None]:
        engine = sql_engine(self._url)
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        yield engine
        await engine.dispose()

    @provide(scope=Scope.REQUEST)
    async def session(self, engine: AsyncEngine) -> AsyncGenerator[AsyncSession, BaseException | None]:
        async with AsyncSession(engine) as session:
            error = yield session
            if error is None:
                await session.commit()


def bookings_providers(settings: Settings) -> Sequence[Provider]:
    assert isinstance(settings.store, SqliteStoreSettings)
    return [
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(bookings, transaction=AsyncSession),
        DatabaseProvider(f"sqlite+aiosqlite:///{settings.store.path}"),
    ]


platform = Platform(
    Service("bookings", providers=bookings_providers),
    Service("mails", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(mails)]),
)


async def main() -> None:
    async with embedded() as servers:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings.model_validate(
                {
                    **servers.settings(),
                    "store": {"kind": "sqlite", "path": str(Path(folder) / "bookings.db")},
                    "telemetry": {"spans": "off", "metrics_enabled": False},
                }
            )
            await run(settings)


async def run(settings: Settings) -> None:
    """Publish a payment twice."""
    publisher = EventPublisher(settings.kafka)
    payment = PaymentReceived(account="1", amount=30, aggregate_id="1")
    await publisher.publish(payment, payment)
    await publisher.close()
    group = ServiceGroup(platform.choose(), settings)
    running = asyncio.create_task(group.run())
    while not (settled(group.reports()) or running.done()):
        await asyncio.wait({running}, timeout=0.05)
    for report in group.reports():
        print(f"{report.name}: {report.tally.handled} handled, {report.tally.duplicates} duplicates blocked")
    group.stop()
    await running


def settled(reports: Sequence[ServiceReport]) -> bool:
    """Return whether both deliveries are settled and the mail is sent."""
    seen = {report.name: report.tally for report in reports}
    return seen["bookings"].handled + seen["bookings"].duplicates == 2 and seen["mails"].handled == 1


if __name__ == "__main__":
    asyncio.run(main())
