"""What a worker does with events whose handlers fail, by the rules of handler, router and settings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from integr8s_idem import BaseEvent, EventRouter, IdempotencyStatus, PartialFailureError, Service, Settings
from integr8s_idem.engine.results import discarded_error
from integr8s_idem.errors import PermanentError, RetryAfter, ServiceStoppedError
from integr8s_idem.failures import FailureRule, dead_letter, discard, retry, retry_later, stop
from integr8s_idem.integrations.dishka import (
    DispatcherProvider,
    IdempotencyProvider,
    IdempotentDispatcherProvider,
    KafkaProvider,
)
from integr8s_idem.testing import CrashPoint, WorkerHarness

MAX_ATTEMPTS = 3


class Placed(BaseEvent):
    event_type: Literal["placed"] = "placed"
    order: str = "1"


class Charges:
    """A handler that raises planned errors, one for each run of an order, and then succeeds."""

    def __init__(self, **errors: Sequence[Exception]) -> None:
        self.planned = {order: list(each) for order, each in errors.items()}
        self.charged: list[str] = []
        self.runs: list[tuple[str, float]] = []
        """Order and time of each run, by the clock of the event loop."""

    async def charge(self, event: Placed) -> str:
        self.runs.append((event.order, asyncio.get_running_loop().time()))
        if planned := self.planned.get(event.order):
            raise planned.pop(0)
        self.charged.append(event.order)
        return "receipt"

    async def charge_all(self, events: list[Placed]) -> None:
        errors: dict[int, Exception] = {}
        for index, event in enumerate(events):
            try:
                await self.charge(event)
            except Exception as error:  # noqa: BLE001  # reported for each event
                errors[index] = error
        if errors:
            raise PartialFailureError(errors)

    @property
    def pauses(self) -> list[float]:
        """The seconds between runs."""
        times = [time for _, time in self.runs]
        return [later - earlier for earlier, later in pairwise(times)]


def harness_of(
    charges: Charges,
    *rules: FailureRule,
    router: Sequence[FailureRule] = (),
    guarded: bool = True,
    batches: bool = False,
    **service: Any,
) -> WorkerHarness:
    """Return a harness with one handler.  `service`: settings of the service."""
    handlers = EventRouter(failures=router)
    if batches:
        handlers.on_batch(Placed, name="charge", failures=rules)(charges.charge_all)
    else:
        handlers.on(Placed, name="charge", failures=rules)(charges.charge)
    dispatcher = IdempotentDispatcherProvider(handlers) if guarded else DispatcherProvider(handlers)
    providers = [IdempotencyProvider(), KafkaProvider(), dispatcher] if guarded else [KafkaProvider(), dispatcher]
    settings = Settings.model_validate(
        {"idempotency": {"max_attempts": MAX_ATTEMPTS}, "services": {"billing": service}}
    )
    return WorkerHarness(Service("billing", providers=providers), settings=settings)


both = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])
all_kinds = pytest.mark.parametrize(
    "kind", [{"guarded": True}, {"guarded": False}, {"batches": True}], ids=["guarded", "unguarded", "batch"]
)


@all_kinds
async def test_a_discarded_event_is_settled_after_one_attempt(kind: dict[str, Any]) -> None:
    charges = Charges(withdrawn=[KeyError("no such order")])

    async with harness_of(charges, discard(KeyError), **kind) as harness:
        await harness.publish(Placed(order="withdrawn"), Placed(order="2"))

        assert harness.dead_letters == []
        assert _tally(harness).discarded == 1
    assert charges.charged == ["2"]
    assert [order for order, _ in charges.runs] == ["withdrawn", "2"]


async def test_a_redelivery_of_a_discarded_event_is_a_duplicate() -> None:
    charges = Charges(**{"1": [KeyError("no such order")]})

    async with harness_of(charges, discard(KeyError)) as harness:
        await harness.publish(Placed())
        await harness.redeliver_all()
        [record] = await harness.records()

        assert harness.duplicates == 1
    assert len(charges.runs) == 1
    assert record.status is IdempotencyStatus.COMPLETED
    assert record.result is not None
    assert record.result.body == b"KeyError: 'no such order'"


@pytest.mark.parametrize("point", [CrashPoint.AFTER_COMPLETE, CrashPoint.BEFORE_COMMIT])
async def test_an_event_that_was_discarded_before_a_crash_is_a_duplicate(point: CrashPoint) -> None:
    charges = Charges(**{"1": [KeyError("no such order")]})

    async with harness_of(charges, discard(KeyError)) as harness:
        harness.crash_at(point)
        await harness.publish(Placed())

        assert harness.duplicates == 1
    assert len(charges.runs) == 1


async def test_an_event_whose_discard_is_not_recorded_is_handled_again() -> None:
    charges = Charges(**{"1": [KeyError("no such order")]})

    async with harness_of(charges, discard(KeyError)) as harness:
        harness.crash_at(CrashPoint.BEFORE_COMPLETE)
        await harness.publish(Placed())

    assert charges.charged == ["1"]


async def test_a_discarded_event_waits_for_the_store() -> None:
    charges = Charges(**{"1": [KeyError("no such order")]})

    async with harness_of(charges, discard(KeyError)) as harness:
        harness.store.fail_next("complete", times=3)
        await harness.publish(Placed())
        [record] = await harness.records()

        assert _tally(harness).discarded == 1
    assert len(charges.runs) == 1
    assert record.status is IdempotencyStatus.COMPLETED


async def test_the_span_of_a_discarded_event_says_so() -> None:
    charges = Charges(**{"1": [KeyError("no such order")]})

    async with harness_of(charges, discard(KeyError)) as harness:
        await harness.publish(Placed())
        [delivery] = [span for span in harness.spans if span.name == "process placed"]

    assert delivery.attributes["idempotency.outcome"] == "discarded"
    assert delivery.attributes["idempotency.attempt"] == 1


@all_kinds
async def test_a_rule_dead_letters_at_once(kind: dict[str, Any]) -> None:
    charges = Charges(**{"1": [KeyError("no such order")]})

    async with harness_of(charges, dead_letter(KeyError), **kind) as harness:
        await harness.publish(Placed())
        [given_up] = harness.dead_letters

        assert (given_up.reason, given_up.attempts) == ("handler_failed", 1)
    assert len(charges.runs) == 1


@all_kinds
async def test_a_rule_allows_more_attempts_than_the_service(kind: dict[str, Any]) -> None:
    charges = Charges(**{"1": [OSError()] * 6})

    async with harness_of(charges, retry(OSError, attempts=7), **kind) as harness:
        await harness.publish(Placed())

        assert harness.attempts == [1, 2, 3, 4, 5, 6, 7]
        assert harness.dead_letters == []
    assert charges.charged == ["1"]


@all_kinds
async def test_a_rule_allows_fewer_attempts_than_the_service(kind: dict[str, Any]) -> None:
    charges = Charges(**{"1": [OSError()] * 6})

    async with harness_of(charges, retry(OSError, attempts=2), **kind) as harness:
        await harness.publish(Placed())

        assert harness.attempts == [1, 2]
        assert len(harness.dead_letters) == 1


@both
async def test_pauses_are_those_of_the_rule(guarded: bool) -> None:
    charges = Charges(**{"1": [OSError()] * 4})
    rule = retry(OSError, attempts=9, first_pause=10, longest_pause=timedelta(seconds=30), jitter=False)

    async with harness_of(charges, rule, guarded=guarded) as harness:
        await harness.publish(Placed())

    assert charges.pauses == pytest.approx([10, 20, 30, 30], abs=1)


async def test_pauses_that_a_rule_does_not_set_are_those_of_the_service() -> None:
    charges = Charges(**{"1": [OSError()] * 2})
    rule = retry(OSError, jitter=False)

    async with harness_of(charges, rule, retry_initial_seconds=40, retry_max_seconds=50) as harness:
        await harness.publish(Placed())

    assert charges.pauses == pytest.approx([40, 50], abs=1)


@all_kinds
async def test_an_event_is_not_retried_before_the_delay_of_its_rule(kind: dict[str, Any]) -> None:
    charges = Charges(**{"1": [OSError()] * 2})

    async with harness_of(charges, retry_later(OSError, delay=timedelta(minutes=5)), **kind) as harness:
        await harness.publish(Placed())

    assert charges.pauses == pytest.approx([300, 300], abs=1)


@all_kinds
async def test_a_handler_chooses_when_its_event_is_retried(kind: dict[str, Any]) -> None:
    charges = Charges(**{"1": [RetryAfter(timedelta(minutes=5)), RetryAfter(1)]})

    async with harness_of(charges, **kind) as harness:
        await harness.publish(Placed())

        assert harness.attempts == [1, 2, 3]
    assert charges.pauses == pytest.approx([300, 1], abs=0.5)


@both
async def test_attempts_that_ended_with_retry_after_count(guarded: bool) -> None:
    charges = Charges(**{"1": [RetryAfter(1)] * 9})

    async with harness_of(charges, guarded=guarded) as harness:
        await harness.publish(Placed())
        [given_up] = harness.dead_letters

    assert given_up.attempts == MAX_ATTEMPTS


async def test_an_event_that_waits_for_longer_than_its_record_is_kept_is_given_up_nevertheless() -> None:
    charges = Charges(**{"1": [OSError()] * 9})
    rule = retry_later(OSError, delay=timedelta(minutes=10))

    async with harness_of(charges, rule) as harness:
        harness.send(Placed())
        for _ in range(MAX_ATTEMPTS):
            await harness.advance(700)
            for record in await harness.records():  # as if it had expired
                if record.status is IdempotencyStatus.PROCESSING:
                    await harness.store.inner.delete([record.key])
        await harness.settled()

        assert len(harness.dead_letters) == 1
    assert len(charges.runs) == MAX_ATTEMPTS


async def test_other_events_are_handled_while_one_waits_for_its_delay() -> None:
    charges = Charges(slow=[RetryAfter(600)])

    async with harness_of(charges, ordering="none", concurrency=1) as harness:
        await harness.publish(Placed(order="slow"), Placed(order="2"))

    assert charges.charged == ["slow", "2"] or charges.charged == ["2", "slow"]
    [first, *others] = charges.runs
    assert first[0] == "slow"
    assert {order for order, _ in others} == {"slow", "2"}


@pytest.mark.parametrize(
    ("rules", "router", "settings", "runs"),
    [
        ([discard(KeyError)], [retry(KeyError)], "retry", 1),
        ([], [discard(KeyError)], "retry", 1),
        ([], [], "discard", 1),
        ([retry(OSError)], [], "retry", 2),
    ],
    ids=["handler", "router", "settings", "no match"],
)
async def test_rules_of_the_handler_precede_those_of_the_router_and_of_the_settings(
    rules: list[FailureRule], router: list[FailureRule], settings: str, runs: int
) -> None:
    charges = Charges(**{"1": [KeyError()]})
    failures = [{"error": "builtins.KeyError", "action": settings}]

    async with harness_of(charges, *rules, router=router, failures=failures) as harness:
        await harness.publish(Placed())

    assert len(charges.runs) == runs


def test_an_included_router_keeps_its_rules_before_those_of_the_other() -> None:
    inner, outer = EventRouter(failures=[retry(OSError)]), EventRouter(failures=[stop(MemoryError)])
    inner.on(Placed, failures=[discard(KeyError)])(Charges().charge)

    outer.include(inner)

    [handler] = outer.handlers
    assert handler.failures == (discard(KeyError), retry(OSError), stop(MemoryError))


# Stopping.


@all_kinds
async def test_an_error_stops_the_service_and_its_event_is_not_settled(kind: dict[str, Any]) -> None:
    charges = Charges(corrupt=[MemoryError("the ledger is damaged")])
    harness = harness_of(charges, stop(MemoryError), **kind)

    async with harness:
        await harness.publish(Placed(order="1"))
        with pytest.raises(ServiceStoppedError, match=r"the ledger is damaged.*stop\(MemoryError\)"):
            await harness.publish(Placed(order="corrupt"), Placed(order="3"))
        records = await harness.records()

        assert harness.dead_letters == []
        assert _committed(harness) == 1
    assert charges.charged == ["1"]
    if kind != {"guarded": False}:
        assert sorted(record.status.value for record in records) == ["completed", "processing"]
        assert all(record.lease_until is None for record in records)


async def test_a_service_that_stops_completes_the_handlers_that_run() -> None:
    charges = Charges(corrupt=[MemoryError()])
    may_end = asyncio.Event()

    async def wait(event: Placed) -> None:
        if event.order == "slow":
            await may_end.wait()
        await charges.charge(event)

    router = EventRouter()
    router.on(Placed, failures=[stop(MemoryError)])(wait)
    harness = WorkerHarness(
        Service("billing", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)]),
        settings=Settings.model_validate({"services": {"billing": {"ordering": "none"}}}),
    )

    async with harness:
        harness.send(Placed(order="slow"), partition=0)
        harness.send(Placed(order="corrupt"), partition=0)
        asyncio.get_running_loop().call_later(2, may_end.set)
        with pytest.raises(ServiceStoppedError):
            await harness.settled()
        records = await harness.records()

    assert charges.charged == ["slow"]
    assert sorted(record.status.value for record in records) == ["completed", "processing"]


async def test_a_later_event_of_its_lane_does_not_overtake_an_event_that_stops_the_service() -> None:
    charges = Charges(corrupt=[MemoryError()])

    async with harness_of(charges, stop(MemoryError)) as harness:
        for order in ("corrupt", "2", "3"):
            harness.send(Placed(order=order), partition=0)
        with pytest.raises(ServiceStoppedError):
            await harness.settled()

    assert [order for order, _ in charges.runs] == ["corrupt"]


# Batches.


class Index:
    """A batch handler that fails as a whole if the batch has a certain event."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.batches: list[list[str]] = []

    async def index(self, events: list[Placed]) -> None:
        orders = [event.order for event in events]
        self.batches.append(orders)
        if "bad" in orders:
            raise self.error


@pytest.mark.parametrize(
    "rule",
    [
        discard(KeyError),
        dead_letter(KeyError),
        retry(KeyError, attempts=1),
        retry_later(KeyError, delay=5, attempts=1),
        retry(OSError),  # no rule for the error: one attempt, by the settings
    ],
    ids=str,
)
@both
async def test_a_rule_ends_only_the_event_that_made_a_batch_fail(rule: FailureRule, guarded: bool) -> None:
    index, router = Index(KeyError("bad")), EventRouter()
    router.on_batch(Placed, max_size=3, max_wait=5, failures=[rule])(index.index)
    dispatcher = IdempotentDispatcherProvider(router) if guarded else DispatcherProvider(router)
    providers = [IdempotencyProvider(), KafkaProvider(), dispatcher] if guarded else [KafkaProvider(), dispatcher]
    settings = Settings.model_validate(
        {"idempotency": {"max_attempts": 1}, "services": {"billing": {"ordering": "none"}}}
    )

    async with WorkerHarness(Service("billing", providers=providers), settings=settings) as harness:
        for order in ("1", "bad", "3"):
            harness.send(Placed(order=order))
        await harness.settled()

        assert _tally(harness).handled == 2
        assert _tally(harness).discarded + len(harness.dead_letters) == 1
    assert index.batches[0] == ["1", "bad", "3"]
    assert sorted(index.batches[1:]) == [["1"], ["3"], ["bad"]]


# Errors that are hard to examine.


class _Broken(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("cannot be checked")


class BrokenError(Exception, metaclass=_Broken):
    """An error whose class cannot be checked."""


def nested(depth: int) -> Exception:
    group: Exception = ValueError("the innermost error")
    for _ in range(depth):
        group = ExceptionGroup("g", [group])
    return group


@pytest.mark.parametrize(
    ("rules", "error"),
    [([], nested(600)), ([], nested(3_000)), ([stop(BrokenError), discard(KeyError)], KeyError("no such order"))],
    ids=["600 groups", "3,000 groups", "a rule that cannot be checked"],
)
@all_kinds
async def test_an_event_whose_error_is_hard_to_examine_is_dead_lettered(
    kind: dict[str, Any], rules: list[FailureRule], error: Exception
) -> None:
    charges = Charges(bad=[error] * MAX_ATTEMPTS)

    async with harness_of(charges, *rules, **kind) as harness:
        await harness.publish(Placed(order="bad"), Placed(order="2"))
        [given_up] = harness.dead_letters

        assert given_up.attempts == MAX_ATTEMPTS
        assert "the innermost error" in given_up.error or "no such order" in given_up.error
        if kind.get("guarded", True):
            assert {record.status for record in await harness.records()} == {
                IdempotencyStatus.FAILED,
                IdempotencyStatus.COMPLETED,
            }
    assert charges.charged == ["2"]


# No rules lose an event.

ERRORS = (KeyError, OSError, PermanentError, RetryAfter, ValueError)
CRASHES = (
    CrashPoint.BEFORE_RESERVE,
    CrashPoint.AFTER_RESERVE,
    CrashPoint.BEFORE_COMMIT,
    CrashPoint.AFTER_COMMIT,
)
"""Points that every delivery reaches."""


def some_rules() -> st.SearchStrategy[list[FailureRule]]:
    makes: list[Callable[..., FailureRule]] = [retry, partial(retry_later, delay=1), dead_letter, discard]
    matched = st.sets(st.sampled_from(ERRORS), min_size=1)
    return st.lists(st.builds(lambda make, errors: make(*errors), st.sampled_from(makes), matched), max_size=4)


def some_errors() -> st.SearchStrategy[list[list[Exception]]]:
    each = st.sampled_from(ERRORS).map(lambda kind: RetryAfter(1) if kind is RetryAfter else kind("planned"))
    return st.lists(st.lists(each, max_size=4), min_size=1, max_size=4)


@hypothesis_settings(max_examples=60)
@given(
    own=some_rules(),
    router=some_rules(),
    planned=some_errors(),
    ordering=st.sampled_from(["partition", "none"]),
    batches=st.booleans(),
    crash=st.none() | st.sampled_from(CRASHES),
)
def test_rules_lose_no_event(
    own: list[FailureRule],
    router: list[FailureRule],
    planned: list[list[Exception]],
    ordering: str,
    batches: bool,
    crash: CrashPoint | None,
) -> None:
    """Each event is charged, dead-lettered or discarded, only one of these, and then its offset is committed."""
    charges = Charges(**{str(number): each for number, each in enumerate(planned)})

    async def run() -> None:
        async with harness_of(charges, *own, router=router, batches=batches, ordering=ordering) as harness:
            if crash is not None:
                harness.crash_at(crash)
            for number in range(len(planned)):
                harness.send(Placed(order=str(number)))
            await harness.settled()
            records = await harness.records()

            ends = Counter(
                "discarded" if discarded_error(record.result) is not None else record.status.value for record in records
            )
            assert ends["completed"] == len(charges.charged) == len(set(charges.charged))
            assert ends["failed"] == len(
                {given_up.headers["idempotency-dlq-record"] for given_up in harness.dead_letters}
            )
            assert ends["completed"] + ends["failed"] + ends["discarded"] == len(planned)
            assert _committed(harness) == len(planned)

    asyncio.run(run())


def _tally(harness: WorkerHarness) -> Any:
    [current] = harness._here.present()
    assert current.worker is not None
    return current.worker.report().tally


def _committed(harness: WorkerHarness) -> int:
    """Return how many messages the group has committed, of all partitions."""
    [current] = harness._here.present()
    sent = len([message for message in harness.messages("placed") if not message.is_copy])
    return sent - current.lag
