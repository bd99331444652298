"""Reconcile functions of handlers in a worker: when they are asked, and what follows from their answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import pytest
from dishka import FromDishka, Provider, Scope

from integr8s_idem import BaseEvent, EventRouter, IdempotencyStatus, Outgoing, PermanentError, Service, Settings
from integr8s_idem.errors import OutcomeUnknownError, ServiceStoppedError
from integr8s_idem.failures import FailureRule, discard, retry_later, stop
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider
from integr8s_idem.reconciliation import Answer, Done, NotDone, Unknown
from integr8s_idem.testing import CrashPoint, WorkerHarness
from integr8s_idem.worker.dead_letters import replay_of

MAX_ATTEMPTS = 3


class Requested(BaseEvent):
    event_type: Literal["requested"] = "requested"
    order: str = "1"


class Charged(BaseEvent):
    event_type: Literal["charged"] = "charged"
    order: str


class Bank:
    """Charges cards, and can be searched."""

    def __init__(self, *ends: Callable[[], Awaitable[None]]) -> None:
        self.charges: list[str] = []
        self.ends = list(ends)
        """What happens after the charge, for each of the first runs."""
        self.answers: list[Answer | Callable[[], Awaitable[Answer]]] = []
        """Replace what a search finds."""
        self.asked_at: list[float] = []

    async def charge(self, order: str) -> str:
        self.charges.append(order)
        if self.ends:
            await self.ends.pop(0)()
        return f"receipt of {order}"

    async def find(self, order: str) -> Answer:
        self.asked_at.append(asyncio.get_running_loop().time())
        if not self.answers:
            return Done(f"found {order}") if order in self.charges else NotDone()
        planned = self.answers.pop(0)
        return await planned() if callable(planned) else planned


async def find_charge(event: Requested, bank: FromDishka[Bank], outgoing: FromDishka[Outgoing]) -> Answer:
    outgoing.publish(Charged(order=event.order))
    return await bank.find(event.order)


async def charge(event: Requested, bank: FromDishka[Bank], outgoing: FromDishka[Outgoing]) -> str:
    outgoing.publish(Charged(order=event.order))
    return await bank.charge(event.order)


def harness_of(
    bank: Bank, *rules: FailureRule, idempotency: dict[str, Any] | None = None, **service: Any
) -> WorkerHarness:
    """Return a harness with one handler that has a reconcile function.  `service`: settings of the service."""
    router, provider = EventRouter(), Provider(scope=Scope.APP)
    router.on(Requested, failures=rules, reconcile=find_charge)(charge)
    provider.provide(lambda: bank, provides=Bank)
    providers = [IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router), provider]
    settings = Settings.model_validate(
        {"idempotency": {"max_attempts": MAX_ATTEMPTS, **(idempotency or {})}, "services": {"billing": service}}
    )
    return WorkerHarness(Service("billing", providers=providers), settings=settings)


def raises(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def fail() -> None:
        raise error

    return fail


async def hang() -> Any:
    await asyncio.sleep(3600)


def questions(harness: WorkerHarness) -> list[tuple[int, str]]:
    """Return the attempt and the end of each question."""
    return [(each.attempt, each.how) for each in harness.reconciliations]


def tally(harness: WorkerHarness) -> Any:
    [current] = harness._here.present()
    assert current.worker is not None
    return current.worker.report().tally


async def test_the_first_attempt_is_not_asked_about() -> None:
    bank = Bank()

    async with harness_of(bank) as harness:
        await harness.publish(Requested(order="1"), Requested(order="2"))
        await harness.redeliver_all()

        assert questions(harness) == []
        assert tally(harness).reconciled == 0
    assert bank.charges == ["1", "2"]


async def test_an_effect_before_a_crash_is_found_by_the_next_worker() -> None:
    bank = Bank()

    async with harness_of(bank) as harness:
        bank.ends.append(lambda: harness.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT.value))
        harness.crash_at(CrashPoint.IN_HANDLER_AFTER_EFFECT)
        await harness.publish(Requested())
        await harness.redeliver_all()
        [record] = await harness.records()

        assert questions(harness) == [(2, "Done")]
        assert (tally(harness).handled, tally(harness).reconciled, harness.duplicates) == (1, 1, 1)
        assert [each.how for each in harness.runs] == ["crashed"]
    assert bank.charges == ["1"]
    assert (record.status, record.attempt) == (IdempotencyStatus.COMPLETED, 2)
    assert record.result is not None
    assert record.result.body == b'"found 1"'


async def test_an_event_of_a_reconcile_function_has_the_id_of_the_handlers_event() -> None:
    bank = Bank()

    async with harness_of(bank) as harness:
        harness.crash_at(CrashPoint.BEFORE_COMPLETE)  # after the handler's event was sent
        await harness.publish(Requested())

        assert questions(harness) == [(2, "Done")]
        sent = [dict(message.headers)["event_id"] for message in harness.messages("charged")]
    assert len(sent) == 2
    assert len(set(sent)) == 1


@pytest.mark.parametrize(
    "end",
    [raises(ConnectionError("the response is lost")), hang, raises(asyncio.CancelledError())],
    ids=["error", "timeout", "cancellation"],
)
async def test_an_effect_before_a_failure_is_found_in_the_same_process(end: Callable[[], Awaitable[None]]) -> None:
    bank = Bank(end)

    async with harness_of(bank, handler_timeout_seconds=5) as harness:
        await harness.publish(Requested())

        assert questions(harness) == [(2, "Done")]
        assert len(harness.published) == 1
    assert bank.charges == ["1"]


@pytest.mark.scenario(151)
async def test_an_effect_of_a_worker_that_stalls_is_found_by_the_one_that_takes_over() -> None:
    bank = Bank()

    async with harness_of(bank) as harness:
        bank.ends.append(lambda: harness.reached(CrashPoint.IN_HANDLER_AFTER_EFFECT.value))
        harness.stall_at(CrashPoint.IN_HANDLER_AFTER_EFFECT)
        await harness.publish(Requested())
        [record] = await harness.records()

        assert questions(harness) == [(2, "Done")]
        assert record.result is not None
        assert record.result.body == b'"found 1"'
    assert bank.charges == ["1"]


async def test_the_handler_runs_in_the_same_attempt_after_not_done() -> None:
    bank = Bank()

    async with harness_of(bank) as harness:
        harness.crash_at(CrashPoint.BEFORE_HANDLER)
        await harness.publish(Requested())

        assert questions(harness) == [(2, "NotDone")]
        assert harness.attempts == [2]
        assert len(harness.messages("charged")) == 1
        assert tally(harness).reconciled == 0
    assert bank.charges == ["1"]


@pytest.mark.scenario(152)
async def test_an_unknown_outcome_is_asked_for_again_after_its_delay() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [Unknown(retry_after=timedelta(minutes=5), reason="pending")]

    async with harness_of(bank) as harness:
        await harness.publish(Requested())

        assert questions(harness) == [(2, "Unknown"), (3, "Done")]
        assert len(harness.published) == 1
    first, second = bank.asked_at
    assert second - first == pytest.approx(300, abs=1)
    assert bank.charges == ["1"]


@pytest.mark.scenario(152)
async def test_an_outcome_that_remains_unknown_is_dead_lettered_with_its_own_reason() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [Unknown(60, "pending")] * 9

    async with harness_of(bank) as harness:
        await harness.publish(Requested())
        await harness.redeliver_all()
        [record] = await harness.records()
        given_up, again = harness.dead_letters

        assert (given_up.reason, given_up.attempts) == ("outcome_unknown", MAX_ATTEMPTS)
        assert again.reason == "previously_failed"
        assert "OutcomeUnknownError" in given_up.error
        assert "pending" in given_up.error
    assert record.status is IdempotencyStatus.FAILED
    assert record.error.startswith("OutcomeUnknownError: ")
    assert bank.charges == ["1"]


async def test_a_rule_allows_more_questions() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [Unknown(60)] * 9

    async with harness_of(bank, retry_later(OutcomeUnknownError, delay=0, attempts=20)) as harness:
        await harness.publish(Requested())

        assert len(questions(harness)) == 10
        assert harness.dead_letters == []


@pytest.mark.parametrize("block", [True, False])
async def test_an_unknown_outcome_is_no_failure_that_blocks(block: bool) -> None:
    bank = Bank()
    bank.answers = [Unknown(60)]

    async with harness_of(bank, idempotency={"on_failure": "block" if block else "retry"}) as harness:
        harness.crash_at(CrashPoint.BEFORE_HANDLER)
        await harness.publish(Requested())

        assert questions(harness) == [(2, "Unknown"), (3, "NotDone")]


@pytest.mark.scenario(153)
async def test_errors_of_a_reconcile_function_count_as_attempts() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [raises(OSError("the bank is down"))] * 9

    async with harness_of(bank) as harness:
        await harness.publish(Requested())
        [given_up] = harness.dead_letters

        assert questions(harness) == [(2, "OSError"), (3, "OSError")]
        assert (given_up.reason, given_up.attempts) == ("handler_failed", MAX_ATTEMPTS)
    assert bank.charges == ["1"]


async def test_a_permanent_error_of_a_reconcile_function_gives_up() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [raises(PermanentError("the account is closed"))]

    async with harness_of(bank) as harness:
        await harness.publish(Requested())
        [given_up] = harness.dead_letters

        assert given_up.attempts == 2
        assert harness.published == []


async def test_rules_apply_to_errors_of_a_reconcile_function() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [raises(KeyError("no account"))]

    async with harness_of(bank, discard(KeyError)) as harness:
        await harness.publish(Requested())

        assert tally(harness).discarded == 1
    assert bank.charges == ["1"]


async def test_a_service_can_stop_when_the_outcome_is_unknown() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [Unknown(60, "ask an operator")]

    async with harness_of(bank, stop(OutcomeUnknownError)) as harness:
        with pytest.raises(ServiceStoppedError, match="ask an operator"):
            await harness.publish(Requested())

        assert harness.dead_letters == []


@pytest.mark.scenario(153)
async def test_a_reconcile_function_that_hangs_is_cancelled_by_the_timeout_of_the_handler() -> None:
    bank = Bank(raises(ConnectionError()))
    bank.answers = [hang]

    async with harness_of(bank, handler_timeout_seconds=5) as harness:
        await harness.publish(Requested())

        assert questions(harness) == [(2, "cancelled"), (3, "Done")]
    assert bank.charges == ["1"]


async def test_a_crash_in_a_reconcile_function_counts_as_an_attempt() -> None:
    bank = Bank()

    async with harness_of(bank) as harness:

        async def crash() -> Answer:
            await harness.reached("asked")
            return Done("found")

        bank.answers = [crash]
        harness.crash_at(CrashPoint.BEFORE_HANDLER)
        harness.crash_at("asked")
        await harness.publish(Requested())

        assert questions(harness) == [(2, "crashed"), (3, "NotDone")]
        assert harness.attempts == [3]
    assert bank.charges == ["1"]


@pytest.mark.scenario(153)
async def test_a_worker_whose_reconcile_function_always_crashes_gives_the_event_up() -> None:
    bank = Bank()

    async with harness_of(bank) as harness:
        harness.crash_at(CrashPoint.BEFORE_HANDLER)
        for occurrence in range(1, 11):
            harness.crash_at("asked", occurrence)

        async def crash() -> Answer:
            await harness.reached("asked")
            raise AssertionError("unreachable")

        bank.answers = [crash] * 40
        await harness.publish(Requested())
        [given_up] = harness.dead_letters
        harness._here.world.points.planned.clear()  # it is given up earlier

        assert "CrashedTooOftenError" in given_up.error
    assert bank.charges == []


async def test_a_reconcile_function_that_blocks_past_its_lease_starts_no_handler() -> None:
    bank = Bank(raises(ConnectionError()))

    async def block() -> Answer:
        time.sleep(1.2)  # noqa: ASYNC251  # as a blocking client
        return NotDone()

    bank.answers = [block]
    idempotency = {"processing_timeout_seconds": 1}

    async with harness_of(bank, idempotency=idempotency) as harness:
        await harness.publish(Requested())

        assert questions(harness)[0] == (2, "NotDone")
        assert questions(harness)[-1][1] == "Done"
    assert bank.charges == ["1"]


@pytest.mark.parametrize("answer", [None, True, "done", Done])
async def test_another_answer_is_an_error_that_names_the_three(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    bank = Bank(raises(ConnectionError()))

    async def other() -> Any:
        return answer

    bank.answers = [other]

    async with harness_of(bank) as harness:
        await harness.publish(Requested())

        assert questions(harness)[-1] == (3, "Done")
    assert "return Done(result), NotDone() or Unknown(retry_after=…)" in caplog.text


async def test_a_replay_of_a_dead_letter_is_asked_about() -> None:
    bank = Bank(raises(PermanentError("no response")))

    async with harness_of(bank) as harness:
        await harness.publish(Requested())
        [dead_letter] = harness.messages("requested.dlq")
        replay = replay_of(dead_letter)
        harness.put(replay.topic, replay.value, replay.headers, key=replay.key)
        await harness.settled()

        assert questions(harness) == [(1, "Done")]
        assert tally(harness).reconciled == 1
    assert bank.charges == ["1"]


async def test_an_attempt_whose_record_has_vanished_is_asked_about_in_the_same_process() -> None:
    bank = Bank(raises(ConnectionError()))

    async with harness_of(bank, retry_later(ConnectionError, delay=600)) as harness:
        harness.send(Requested())
        await harness.advance(300)
        [record] = await harness.records()
        await harness.store.inner.delete([record.key])
        await harness.settled()

        assert questions(harness) == [(2, "Done")]
    assert bank.charges == ["1"]


async def test_a_run_without_a_store_is_asked_about() -> None:
    bank = Bank()

    async with harness_of(bank, idempotency={"on_store_error": "open"}) as harness:
        harness.store.fail_next("reserve", times=9)
        await harness.publish(Requested())

        assert questions(harness) == [(1, "NotDone")]
    assert bank.charges == ["1"]


async def test_a_question_is_in_the_spans_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    bank = Bank(raises(ConnectionError()))

    with caplog.at_level(logging.INFO, "integr8s_idem"):
        async with harness_of(bank) as harness:
            await harness.publish(Requested())
            [asked] = [span for span in harness.spans if span.name == "idempotency.reconcile"]

    assert (asked.attributes["idempotency.answer"], asked.attributes["idempotency.attempt"]) == ("done", 2)
    assert "its reconcile function answered done, before attempt 2" in caplog.text


@pytest.mark.parametrize("ends", [[], [Unknown(1)], [raises(OSError()), Unknown(1)]], ids=len)
@pytest.mark.parametrize(
    "point",
    [CrashPoint.AFTER_RESERVE, CrashPoint.BEFORE_PUBLISH, CrashPoint.BEFORE_COMPLETE, CrashPoint.AFTER_COMPLETE],
)
@pytest.mark.scenario(151)
async def test_a_card_is_charged_once_at_any_crash(point: CrashPoint, ends: Sequence[Any]) -> None:
    bank = Bank()
    bank.answers = list(ends)

    async with harness_of(bank, idempotency={"max_attempts": 9}) as harness:
        harness.crash_at(point)
        await harness.publish(Requested())
        await harness.redeliver_all()

        assert harness.dead_letters == []
        assert len(harness.published) == 1
    assert bank.charges == ["1"]
