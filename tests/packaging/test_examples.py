"""The examples run unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from dishka import STRICT_VALIDATION, make_async_container
from dishka.exceptions import NoFactoryError

from examples.billing import containers
from examples.billing.handlers import OrderPaid, OrderPlaced, audit_router, router
from examples.billing.payments import Payments
from examples.billing.workers import platform
from integr8s_idem import (
    EventDispatcher,
    EventPublisher,
    EventRouter,
    IdempotentEventDispatcher,
    Settings,
    load_settings,
)
from integr8s_idem.config import settings_warnings
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    EventContextProvider,
    FromDishka,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.runtime import Service, make_container
from integr8s_idem.worker import ServiceWorker

ROOT = Path(__file__).parents[2]
ENTRIES = {
    "functions": [
        "paying 30 back for order 7",
        "True Refund(number=1, amount=Decimal('30'))",
        "another amount for the same order is refused",
        "writing the invoice of order 7",
        "invoice-7.pdf",
        "invoice-7.pdf",
    ],
    "steps": [
        "reserving the goods of order 7",
        "the carrier does not answer",
        "a van for shelf 12, order 7",
    ],
    "batches": [
        "100 handled, 100 duplicates blocked",
        "100 rows, 100 of them different, 1 refused at first",
    ],
    "faststream_orders": [
        "charging order 7",
        "mail: receipt-7",
        "charging order 8",
        "mail: receipt-8",
        "dead letter: no key can be made: orders[0]@0 has no header event_id to make a key of. "
        "Read more: integr8s-idem errors InvalidKeyError",
    ],
    "aiokafka_loop": [
        "charging order-7",
        "receipt of order-7",
        "receipt of order-7",
        "charging order-8",
        "receipt of order-8",
    ],
    "confluent_loop": [
        "charging order-7",
        "receipt of order-7",
        "receipt of order-7",
        "charging order-8",
        "receipt of order-8",
    ],
    "http_orders": [
        "a: 201 order 1",
        "a: 201 order 1 (replayed)",
        "a: 422 Idempotency-Key is already used",
        "b: 409 A request is outstanding for this Idempotency-Key",
        "b: 201 order 2",
        "placed: 2",
    ],
    "envelopes": [
        "charging order 7: event https://shop.example/orders#17",
        "1 handled, 1 duplicates blocked",
    ],
}
"""The output of each example program."""
WITHOUT = """
import runpy, sys
sys.modules[{missing!r}] = None
sys.argv = sys.argv[:1]
runpy.run_module({module!r}, run_name="__main__")
"""
BILLING = ROOT / "examples" / "billing"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove settings of this machine."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def settings() -> Settings:
    return load_settings(BILLING / "settings.toml")


@pytest.fixture(params=list(platform.services.values()), ids=lambda service: service.name)
async def worker(request: pytest.FixtureRequest, settings: Settings) -> AsyncIterator[ServiceWorker]:
    """Create the worker of a service as the process does, without running it."""
    service: Service = request.param
    container = make_container(service, settings)
    dispatcher = await container.get(EventDispatcher)
    publisher = await container.get(EventPublisher)
    yield ServiceWorker(service.name, dispatcher, publisher, settings.kafka, settings.service(service.name))
    await container.close()


def lines_of(module: str) -> list[str]:
    """Run an example with warnings as errors, and return what it prints."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-m", module], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_the_first_minute_charges_once() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "first_minute.py")], capture_output=True, text=True, timeout=30
    )

    assert (ran.stdout, ran.stderr) == ("charging the card\nreceipt-1\nreceipt-1\n", "")


def test_the_settings_of_the_first_hour_are_valid_without_warnings(settings: Settings) -> None:
    assert settings_warnings(settings, platform.services) == []
    assert settings.service("billing").group_id == "billing"


def test_the_platform_of_the_first_hour_has_both_services() -> None:
    assert list(platform.services) == ["billing", "audit"]


async def test_topics_are_derived_from_the_routers(worker: ServiceWorker) -> None:
    read = {"billing": ("shop.order_placed",), "audit": ("shop.order_paid",)}

    assert worker.topics == read[worker.name]
    assert (router.events, audit_router.events) == ((OrderPlaced,), (OrderPaid,))


async def test_billing_is_guarded_and_audit_is_not(settings: Settings) -> None:
    billing, audit = (make_container(service, settings) for service in (containers.billing, containers.audit))

    assert type(await billing.get(EventDispatcher)) is IdempotentEventDispatcher
    assert type(await audit.get(EventDispatcher)) is EventDispatcher
    await billing.close()
    await audit.close()


async def test_a_handler_with_a_missing_dependency_is_rejected_at_startup(settings: Settings) -> None:
    incomplete = EventRouter()

    @incomplete.on(OrderPlaced)
    async def charge(event: OrderPlaced, payments: FromDishka[Payments]) -> None: ...

    with pytest.raises(NoFactoryError, match="Payments"):
        make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            KafkaProvider(),
            DispatcherProvider(incomplete),
            context={Settings: settings, ServiceName: ServiceName("billing")},
            validation_settings=STRICT_VALIDATION,
        )


def test_the_first_hour_on_embedded_servers_charges_once() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "examples.billing"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "billing: 1 handled, 1 duplicates blocked",
        "audit: 1 handled, 0 duplicates blocked",
    ]


def test_an_existing_consumer_is_observed_and_then_guarded() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "examples.adoption"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert [lines[0], *lines[-2:]] == [
        "before: 4 messages, 3 orders, 4 charges",
        "observing: 7 messages, 4 orders, 7 charges",
        "enforcing: 4 messages, 2 orders, 2 charges",
    ]
    assert lines[1] == "billing: observes, keeps records for 1 h"
    counts = {line.rsplit("  ", 1)[0].strip() for line in lines[2:10]}
    assert {"deliveries      7", "duplicates      3", "republished   3", "other payload 1"} <= counts
    assert "service billing only observes" in ran.stderr


def test_a_duplicate_payment_is_booked_once_in_the_handlers_transaction() -> None:
    assert lines_of("examples.bookings") == [
        "mail: account 1 has 30",
        "bookings: 1 handled, 1 duplicates blocked",
        "mails: 1 handled, 0 duplicates blocked",
    ]


def test_a_nightly_job_that_runs_twice_has_each_invoice_mailed_once() -> None:
    failed, *mails, handled = lines_of("examples.nightly_invoices")

    assert failed == "job: the disk is full, nothing is published"
    assert sorted(mails) == ["mail: invoice of order 7", "mail: invoice of order 8"]  # of two keys, so in any order
    assert handled == "mails: 2 handled, 2 duplicates blocked"


def test_events_are_retried_discarded_and_dead_lettered_by_their_errors() -> None:
    assert lines_of("examples.failures") == [
        "2 handled, 1 discarded, 1 dead-lettered",
        "early: 2 attempts, invalid: 1 attempts, unlucky: 10 attempts, withdrawn: 1 attempts",
    ]


def test_a_reconcile_function_finds_the_charges_of_earlier_attempts() -> None:
    assert lines_of("examples.reconcile") == [
        "4 handled, 2 of them without another run; charged: ['0', '1', '2', '3']",
        "1: Done, 2: Done, 2: Unknown, 3: NotDone",
    ]


def test_two_processes_share_the_records_of_one_redis() -> None:
    assert lines_of("examples.shared_store") == ["first: refunding order 7", "first: refund-1", "second: refund-1"]


def test_every_entry_point_has_a_program() -> None:
    programs = {path.stem for path in (ROOT / "examples" / "entries").glob("*.py")} - {"__init__"}

    assert programs == set(ENTRIES)


def test_the_readme_names_the_program_of_every_entry_point() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    assert [entry for entry in ENTRIES if f"`python -m examples.entries.{entry}`" not in readme] == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_point_does_duplicate_work_once(entry: str) -> None:
    assert lines_of(f"examples.entries.{entry}") == ENTRIES[entry]


@pytest.mark.parametrize(
    ("module", "missing", "extras", "status"),
    [
        ("examples.bookings", "sqlalchemy", "'.[embedded,sql]'", 1),
        ("examples.demo.__main__", "sqlalchemy", "'.[embedded,sql]'", 2),
        ("examples.entries.http_orders", "fastapi", "fastapi '.[httpx]'", 1),
        ("examples.entries.http_orders", "httpx", "fastapi '.[httpx]'", 1),
    ],
)
def test_an_example_without_its_extra_says_what_to_install(module: str, missing: str, extras: str, status: int) -> None:
    code = WITHOUT.format(module=module, missing=missing)

    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert ended.returncode == status
    assert f"pip install {extras} in the checkout" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_comparison_of_retries_draws_both_kinds(tmp_path: Path) -> None:
    picture = tmp_path / "retries.svg"

    command = [sys.executable, "-m", "examples.retries", "--seconds", "2", "--picture", str(picture)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)

    assert done.returncode == 0, done.stderr
    compared = [line.split()[0] for line in done.stdout.splitlines() if "orders wait; all are charged" in line]
    assert compared == ["block", "overtake"]
    assert picture.read_text().count("<polyline") == 4
