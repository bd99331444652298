"""`WorkerHarness`: faults in memory and in simulated time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Literal

import pytest
from dishka import STRICT_VALIDATION, AsyncContainer, FromDishka, Provider, Scope, make_async_container, provide
from dishka.provider import BaseProvider

from integr8s_idem import Attempt, BaseEvent, EventRouter, Outgoing, Platform, Service, Settings
from integr8s_idem._util.loop_fairness import LONGEST_TURN
from integr8s_idem.config import ServiceSettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    EventContextProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
    ServiceName,
    TelemetryProvider,
)
from integr8s_idem.records import IdempotencyRecord, IdempotencyStatus
from integr8s_idem.testing import Fault, NotReachedError, NotSettledError, WorkerHarness
from integr8s_idem.testing.fast_forward import fast_forward
from integr8s_idem.testing.faults import FAULTS

LEASE = 30.0


class Placed(BaseEvent):
    event_type: Literal["placed"] = "placed"
    order: str = "1"


class Paid(BaseEvent):
    event_type: Literal["paid"] = "paid"
    order: str


class Payments:
    """The real service, which no test may call."""

    async def charge(self, order: str, key: str) -> str:
        raise AssertionError("a card was charged")


Hook = Callable[[], Awaitable[object]]


async def nothing() -> None:
    """A hook without effect."""


class FakePayments(Payments):
    """Records charges; with `knows_keys` it ignores repeated keys, like a payment provider."""

    def __init__(self, *, knows_keys: bool = False) -> None:
        self.charges: list[str] = []
        self.before: Hook = nothing
        self.after: Hook = nothing
        self._knows_keys = knows_keys
        self._keys: set[str] = set()

    async def charge(self, order: str, key: str) -> str:
        await self.before()
        if not (self._knows_keys and key in self._keys):
            self.charges.append(order)
        self._keys.add(key)
        await self.after()
        return f"receipt-{order}"


billing, audit = EventRouter(), EventRouter()
closed: list[str] = []


@billing.on(Placed)
async def charge(
    event: Placed, payments: FromDishka[Payments], attempt: FromDishka[Attempt], outgoing: FromDishka[Outgoing]
) -> str:
    receipt = await payments.charge(event.order, attempt.key_for("charge"))
    outgoing.publish(Paid(order=event.order))
    return receipt


@audit.on(Paid)
async def note(event: Paid) -> None:
    """A handler without side effects."""


class ConnectionProvider(Provider):
    payments = provide(Payments, scope=Scope.REQUEST)

    @provide(scope=Scope.APP)
    async def connection(self, name: ServiceName) -> AsyncIterator[list[str]]:
        yield []
        closed.append(name)


billing_providers = [
    IdempotencyProvider(),
    KafkaProvider(),
    IdempotentDispatcherProvider(billing),
    ConnectionProvider(),
]


audit_providers = [
    KafkaProvider(),
    DispatcherProvider(audit),
]


PLATFORM = Platform(Service("billing", providers=billing_providers), Service("audit", providers=audit_providers))
SETTINGS = Settings.model_validate(
    {
        "idempotency": {"processing_timeout_seconds": LEASE, "default_ttl_seconds": 600, "max_attempts": 3},
        "services": {"billing": {"ordering": "key"}},
    }
)


def harness_of(payments: Payments, *services: str) -> WorkerHarness:
    return WorkerHarness(PLATFORM, *(services or ("billing",)), fakes={Payments: payments}, settings=SETTINGS)


async def test_an_event_is_handled_and_its_results_are_recorded() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        await harness.publish(Placed())
        [record] = await harness.records()
        [run], [paid] = harness.runs, harness.published

    assert payments.charges == ["1"]
    assert (run.handler, run.attempt, run.how) == ("charge", 1, "returned")
    assert isinstance(paid, Paid)
    assert record.status is IdempotencyStatus.COMPLETED
    assert harness.dead_letters == []


async def test_a_redelivery_is_answered_by_the_record() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        await harness.publish(Placed(order="1"), Placed(order="2"))
        await harness.redeliver_all()

        assert sorted(payments.charges) == ["1", "2"]
        assert harness.duplicates == 2


async def test_after_a_crash_behind_the_handler_the_next_worker_waits_for_the_lease() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        harness.crash_at("after_handler")
        began, began_really = asyncio.get_running_loop().time(), time.monotonic()
        await harness.publish(Placed())
        took, took_really = asyncio.get_running_loop().time() - began, time.monotonic() - began_really

        assert harness.attempts == [1, 2]
    assert payments.charges == ["1", "1"]
    assert LEASE <= took < LEASE + 10
    assert took_really < LEASE / 3


async def test_a_crash_before_the_handler_counts_as_an_attempt() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        harness.crash_at("before_handler")
        await harness.publish(Placed())

        assert harness.attempts == [2]
    assert payments.charges == ["1"]


async def test_a_crashed_worker_runs_no_further_line_not_even_finally() -> None:
    payments, last_words = FakePayments(), []

    async with harness_of(payments) as harness:

        async def die() -> None:
            try:
                await harness.reached("charged")
                last_words.append("went on")
            finally:
                last_words.append("finally")

        payments.after = die
        harness.crash_at("charged")
        await harness.publish(Placed())
        heard = list(last_words)

        assert [run.how for run in harness.runs] == ["crashed", "returned"]
    assert heard == ["went on", "finally"]  # by the second attempt
    assert last_words == [*heard, "finally"]  # after the end of the test


async def test_the_outcome_of_a_resumed_zombie_is_rejected() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        harness.stall_at("after_handler")
        await harness.publish(Placed())
        [record] = await harness.records()

        assert harness.attempts == [1, 2]
    assert record.attempt == 2
    assert record.status is IdempotencyStatus.COMPLETED


async def test_no_event_is_handled_while_the_store_does_not_answer() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        with harness.store.outage():
            harness.send(Placed())
            await harness.advance(60)
            charged = list(payments.charges)
        await harness.settled()

    assert (charged, payments.charges) == ([], ["1"])


async def test_a_call_with_a_lost_answer_is_repeated_and_nothing_runs_twice() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        harness.store.lose_answer("reserve")
        harness.store.lose_answer("complete")
        await harness.publish(Placed())

        assert harness.attempts == [1]
        assert harness.store.calls["reserve"] > 1


async def test_a_permanent_failure_becomes_a_dead_letter_after_all_attempts() -> None:
    payments = FakePayments()

    async def fail() -> None:
        raise ValueError("no money")

    payments.before = fail
    async with harness_of(payments) as harness:
        await harness.publish(Placed())
        [dead_letter] = harness.dead_letters

        assert harness.attempts == [1, 2, 3]
    assert (dead_letter.topic, dead_letter.reason, dead_letter.attempts) == ("placed.dlq", "handler_failed", 3)
    assert dead_letter.error == "ValueError: no money"


async def test_a_concurrent_duplicate_waits_for_the_first_run() -> None:
    payments, started, may_go_on = FakePayments(), asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        started.set()
        await may_go_on.wait()

    payments.before = hold
    order = Placed()
    async with harness_of(payments) as harness:
        harness.send(order, partition=0)
        await started.wait()
        harness.send(order, partition=1)
        await harness.advance(1)
        running = [run.how for run in harness.runs]
        may_go_on.set()
        await harness.settled()

        assert running == ["running"]
        assert (payments.charges, harness.duplicates) == (["1"], 1)


async def test_several_tasks_may_publish_and_wait_at_the_same_time() -> None:
    payments = FakePayments(knows_keys=True)

    async with harness_of(payments) as harness, harness_of(FakePayments()) as other:
        harness.crash_at("after_handler")
        orders = [harness.publish(Placed(order=order)) for order in "123"]
        await asyncio.gather(*orders, other.publish(Placed()), harness.advance(1))

        assert len(other.runs) == 1

    assert sorted(payments.charges) == ["1", "2", "3"]


async def test_records_expire_after_their_ttl() -> None:
    payments, order = FakePayments(), Placed()

    async with harness_of(payments) as harness:
        await harness.publish(order)
        await harness.advance(601)
        await harness.redeliver(order)

    assert payments.charges == ["1", "1"]


async def test_services_receive_each_others_events() -> None:
    async with harness_of(FakePayments(), "billing", "audit") as harness:
        await harness.publish(Placed())

        assert [(run.service, run.handler) for run in harness.runs] == [("billing", "charge"), ("audit", "note")]


async def test_a_message_that_cannot_be_decoded_becomes_a_dead_letter() -> None:
    async with harness_of(FakePayments()) as harness:
        harness.put("placed", b"no JSON")
        await harness.settled()

        assert [each.reason for each in harness.dead_letters] == ["malformed"]
        assert harness.runs == []


async def test_time_does_not_jump_while_a_handler_waits_for_real_io() -> None:
    payments = FakePayments()
    payments.before = lambda: asyncio.to_thread(time.sleep, 0.05)

    async with harness_of(payments) as harness:
        began = asyncio.get_running_loop().time()
        await harness.publish(Placed())

        assert asyncio.get_running_loop().time() - began < LEASE / 3
        assert harness.attempts == [1]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
async def test_a_repeatable_handler_survives(fault: Fault) -> None:
    payments = FakePayments(knows_keys=True)

    async with harness_of(payments) as harness:
        harness.suffer(fault)
        await harness.publish(Placed())

        assert payments.charges == ["1"]
        assert len(harness.published) == 1


async def test_faults_between_effect_and_record_reveal_a_handler_that_is_not_repeatable() -> None:
    found = []
    for fault in FAULTS:
        payments = FakePayments()
        async with harness_of(payments) as harness:
            harness.suffer(fault)
            await harness.publish(Placed())
        if payments.charges != ["1"]:
            found.append(str(fault))

    assert found == [
        "crash-after_handler",
        "crash-before_publish",
        "crash-after_publish",
        "crash-before_complete",
        "stall-after_handler",
    ]


@pytest.mark.parametrize(
    ("point", "occurrence", "charges", "lapsed_alone"),
    [
        ("before_handler", 3, 1, 1),
        ("after_handler", 1, 2, 1),
        ("before_publish", 1, 2, 1),
        ("after_publish", 1, 2, 1),
        ("before_complete", 1, 2, 1),
        ("after_complete", 1, 1, 0),
    ],
)
async def test_an_isolated_run_may_crash_at_any_point(
    point: str, occurrence: int, charges: int, lapsed_alone: int
) -> None:
    """The record is marked as isolated before the handler starts."""
    payments = FakePayments()
    records: list[IdempotencyRecord] = []

    async def look() -> None:
        records.extend(await harness.records())

    payments.before = look
    async with harness_of(payments) as harness:
        harness.crash_at("before_handler", occurrence=1)
        harness.crash_at("before_handler", occurrence=2)
        harness.crash_at(point, occurrence=occurrence)
        await harness.publish(Placed())
        [record] = await harness.records()
        dead_letters = harness.dead_letters

    assert payments.charges == ["1"] * charges
    assert record.status is IdempotencyStatus.COMPLETED
    assert dead_letters == []
    assert all(each.alone and each.lapsed >= 2 for each in records)
    assert records[-1].lapsed_alone == lapsed_alone


async def test_an_event_that_always_crashes_its_worker_is_given_up_after_isolated_crashes() -> None:
    payments = FakePayments()

    async with harness_of(payments) as harness:
        for occurrence in range(1, 6):  # twice beside others, then max_attempts times alone
            harness.crash_at("before_handler", occurrence=occurrence)
        await harness.publish(Placed())
        [record], [dead_letter] = await harness.records(), harness.dead_letters

    assert payments.charges == []
    assert record.status is IdempotencyStatus.FAILED
    assert "CrashedTooOftenError: 3 runs" in record.error
    assert dead_letter.attempts == 6


async def test_the_harness_leaves_no_tasks_behind() -> None:
    closed.clear()
    before = asyncio.all_tasks()

    async with harness_of(FakePayments()) as harness:
        harness.crash_at("after_handler")
        harness.stall_at("before_complete")
        await harness.publish(Placed())

    assert asyncio.all_tasks() == before
    assert asyncio.get_running_loop().get_task_factory() is None


async def test_a_crashed_worker_begins_nothing_when_it_is_cleaned_up(caplog: pytest.LogCaptureFixture) -> None:
    """Neither a retry, nor a task for events whose turn had come: that would keep the next harness of the loop busy."""
    unordered = SETTINGS.model_copy(update={"services": {"billing": ServiceSettings(ordering="none")}})
    for _ in range(2):
        payments = FakePayments(knows_keys=True)
        async with WorkerHarness(PLATFORM, "billing", fakes={Payments: payments}, settings=unordered) as harness:
            payments.after = partial(harness.reached, "charged")
            harness.crash_at("charged")
            await harness.publish(*(Placed(order=str(number)) for number in range(9)))

    assert caplog.messages == []


async def test_a_worker_that_crashed_while_events_waited_for_their_turn_is_replaced() -> None:
    payments = FakePayments(knows_keys=True)
    unordered = SETTINGS.model_copy(update={"services": {"billing": ServiceSettings(ordering="none")}})
    async with WorkerHarness(PLATFORM, "billing", fakes={Payments: payments}, settings=unordered) as harness:

        async def occupy_the_loop() -> None:
            fast_forward().leap(2 * LONGEST_TURN)
            await asyncio.sleep(0)  # the next event waits for its turn
            await harness.reached("charged")

        payments.after = occupy_the_loop
        harness.crash_at("charged")
        await harness.publish(*(Placed(order=str(number)) for number in range(3)))
        records = await harness.records()

    assert [record.status for record in records] == [IdempotencyStatus.COMPLETED] * 3


async def test_a_container_is_closed_at_the_end() -> None:
    closed.clear()
    payments = FakePayments()
    opened = []

    @billing_with_connection.on(Placed)
    async def open_it(event: Placed, connection: FromDishka[list[str]]) -> None:
        opened.append(connection)

    service = Service("connected", providers=connected_providers)
    async with WorkerHarness(service, fakes={Payments: payments}, settings=SETTINGS) as harness:
        await harness.publish(Placed())
        while_open = list(closed)

    assert (len(opened), while_open, closed) == (1, [], ["connected"])


billing_with_connection = EventRouter()


def connected_providers(settings: Settings) -> list[BaseProvider]:
    return [
        IdempotencyProvider(),
        KafkaProvider(),
        IdempotentDispatcherProvider(billing_with_connection),
        ConnectionProvider(),
    ]


# Incorrect uses.


async def test_a_crash_at_an_unreached_point_fails_the_test() -> None:
    harness = await harness_of(FakePayments()).__aenter__()
    harness.crash_at("after_handlr")
    await harness.publish(Placed())

    with pytest.raises(NotReachedError, match=r"crash at after_handlr \(did you mean after_handler\?\)"):
        await harness.__aexit__(None, None, None)


async def test_the_error_of_an_unreached_occurrence_shows_the_number_of_arrivals() -> None:
    harness = await harness_of(FakePayments()).__aenter__()
    harness.crash_at("after_handler", occurrence=2)
    await harness.publish(Placed())

    with pytest.raises(NotReachedError, match=r"crash at after_handler at arrival 2 \(there were 1\)"):
        await harness.__aexit__(None, None, None)


async def test_an_event_without_a_reading_service_is_rejected() -> None:
    async with harness_of(FakePayments()) as harness:
        with pytest.raises(ApplicationError, match="no service of this harness reads paid; they read: placed"):
            await harness.publish(Paid(order="1"))


async def test_a_fake_of_an_unknown_type_is_rejected() -> None:
    harness = WorkerHarness(PLATFORM, "billing", fakes={FakePayments: FakePayments()}, settings=SETTINGS)

    with pytest.raises(ApplicationError, match=r"type of these fakes: FakePayments; provided: .*Payments"):
        await harness.__aenter__()


async def test_a_factory_that_does_not_accept_overrides_is_rejected() -> None:
    def audit_container(settings: Settings) -> AsyncContainer:
        return make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            KafkaProvider(),
            DispatcherProvider(audit),
            context={Settings: settings, ServiceName: ServiceName("audit")},
        )

    harness = WorkerHarness(Service("audit", container=audit_container), settings=SETTINGS)

    with pytest.raises(
        ApplicationError, match=r"Write: def audit_container\(settings: Settings, \*overrides: Provider\)"
    ):
        await harness.__aenter__()


async def test_a_factory_that_accepts_overrides_gets_those_of_the_harness() -> None:
    payments = FakePayments()

    def billing_container(settings: Settings, *overrides: BaseProvider) -> AsyncContainer:
        return make_async_container(
            TelemetryProvider(),
            EventContextProvider(),
            IdempotencyProvider(),
            KafkaProvider(),
            IdempotentDispatcherProvider(billing),
            ConnectionProvider(),
            *overrides,
            context={Settings: settings, ServiceName: ServiceName("billing")},
            validation_settings=STRICT_VALIDATION,
        )

    service = Service("billing", container=billing_container)
    async with WorkerHarness(service, fakes={Payments: payments}, settings=SETTINGS) as harness:
        await harness.publish(Placed())

    assert len(payments.charges) == 1


async def test_the_error_of_unsettled_deliveries_shows_the_open_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.testing.harness_run.SIMULATED_LIMIT_SECONDS", 60.0)

    async with harness_of(FakePayments()) as harness:
        harness.store.down.add("reserve")
        with pytest.raises(
            NotSettledError, match=r"billing 1 is paused .*1 uncommitted .* switched off by the test: reserve"
        ):
            await harness.publish(Placed())
        harness.store.down.clear()


async def test_using_a_harness_before_entering_it_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="async with harness"):
        await harness_of(FakePayments()).publish(Placed())


async def test_a_harness_that_has_ended_has_only_results_until_it_is_entered_again() -> None:
    async with harness_of(FakePayments()) as harness:
        await harness.publish(Placed())
    before = asyncio.all_tasks()

    for use in (harness.publish(Placed()), harness.redeliver_all(), harness.settled(), harness.advance(1)):
        with pytest.raises(RuntimeError, match="has ended: enter it again"):
            await use
    assert (len(harness.runs), asyncio.all_tasks()) == (1, before)

    async with harness:
        assert harness.runs == []


async def test_overrides_cannot_be_combined_with_a_settings_object() -> None:
    with pytest.raises(ApplicationError, match="set the values in the object"):
        WorkerHarness(PLATFORM, settings=SETTINGS, overrides={"kafka": {}})
