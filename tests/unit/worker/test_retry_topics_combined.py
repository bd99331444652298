"""Retry topics together with other features: what counts as an attempt, reconcile functions, batches, operators."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Literal

import pytest

from integr8s_idem import EventRouter, IdempotencyStatus, IdempotentEventDispatcher, Settings
from integr8s_idem.config import KafkaSettings
from integr8s_idem.config.sections import ReplaySettings
from integr8s_idem.errors import (
    ApplicationError,
    PartialFailureError,
    RetryAfter,
    ScheduledError,
    TransactionAbortedError,
)
from integr8s_idem.failures import discard
from integr8s_idem.keys.event_keys import KeyResolver
from integr8s_idem.reconciliation import Answer, Done, Unknown
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.dead_letters import replay_of
from tests.support.fake_consumer import FakeBroker
from tests.support.fake_worker import running
from tests.support.guarded import Guarded, guarded
from tests.support.pipelines import (
    TOPIC,
    Depot,
    ParcelSent,
    dispatcher_of,
    key_of,
    reserved_by_another,
    unfinished,
)
from tests.unit.worker.test_retry_topics import (
    SECRET,
    TIERS,
    are_settled,
    are_settled_of_retries,
    broker_of,
    copies,
    fields,
    later,
    overtaking,
    parcel,
    record_of,
    retry_topic,
)


def dead_letters(broker: FakeBroker) -> list[dict[str, bytes]]:
    return [dict(dead.headers) for dead in broker.values(f"{TOPIC.topic}.dlq")]


async def forget(here: Guarded, number: int = 0) -> None:
    """Let the record of a parcel expire."""
    await here.manager.delete(KeyResolver().resolve("handle", parcel(number)).key)


# Attempts.


@virtual_time
@pytest.mark.parametrize("delayed_retries", ["block", "overtake"])
async def test_crashes_beside_others_do_not_count(delayed_retries: Literal["block", "overtake"]) -> None:
    here, depot, broker = guarded(max_attempts=5), Depot(errors={0: later(30, 30, 30)}), broker_of(0)
    for _ in range(4):
        await reserved_by_another(here, 0, timedelta(seconds=1))
        await asyncio.sleep(2)

    dispatcher = dispatcher_of(depot.handle, here, delayed_retries=delayed_retries)
    async with running(dispatcher, broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled_of_retries(broker) and broker.committed.get(TOPIC) == 1)

    assert (depot.started, depot.done, dead_letters(broker)) == ([0] * 4, [0], [])
    assert (await record_of(here, 0)).attempt == 8


@virtual_time
@pytest.mark.parametrize("delayed_retries", ["block", "overtake"])
async def test_runs_that_the_database_has_rolled_back_do_not_count(
    delayed_retries: Literal["block", "overtake"],
) -> None:
    aborted = [TransactionAbortedError("parcel", "deadlock")] * 4
    here, depot, broker = guarded(max_attempts=5), Depot(errors={0: [*aborted, *later(30, 30, 30)]}), broker_of(0)

    dispatcher = dispatcher_of(depot.handle, here, delayed_retries=delayed_retries)
    async with running(dispatcher, broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled_of_retries(broker) and broker.committed.get(TOPIC) == 1)

    assert (depot.started, depot.done, dead_letters(broker)) == ([0] * 8, [0], [])


@virtual_time
async def test_attempts_after_the_record_has_expired_have_the_next_numbers_also_in_place() -> None:
    errors = [*later(30), OSError(), *later(30)]
    here, depot, broker = guarded(max_attempts=4), Depot(errors={0: [*errors, *later(30)]}), broker_of(0)

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: len(copies(broker, "1m")) == 1)
        await forget(here)
        await worker.until(lambda: len(copies(broker, "1m")) == 2)
        await forget(here)
        await worker.until(lambda: bool(dead_letters(broker)))

    assert [fields(copy)["attempt"] for copy in copies(broker, "1m")] == ["1", "3"]
    assert [dead["idempotency-dlq-attempts"] for dead in dead_letters(broker)] == [b"4"]


# Reconcile functions.


class Bank:
    """Charges, and answers what it has done."""

    def __init__(self, *answers: Answer, errors: list[Exception]) -> None:
        self.answers = list(answers)
        self.errors = errors
        self.charges = 0

    async def find(self, event: ParcelSent) -> Answer:
        return self.answers.pop(0)

    async def charge(self, event: ParcelSent) -> None:
        self.charges += 1
        if self.errors:
            raise self.errors.pop(0)


def charging(bank: Bank, here: Guarded) -> Any:
    return dispatcher_of(bank.charge, here, delayed_retries="overtake", reconcile=bank.find)


@virtual_time
@pytest.mark.parametrize("expires", [False, True])
async def test_an_event_whose_outcome_is_unknown_is_overtaken_and_asked_about_again(expires: bool) -> None:
    here, broker = guarded(max_attempts=4), broker_of(0, 1)
    bank = Bank(*[Unknown(60)] * 9, errors=[ConnectionError()])

    async with running(charging(bank, here), broker, retry_topics=TIERS) as worker:
        for number in (1, 2):
            await worker.until(lambda number=number: len(copies(broker, "1m")) == number)  # type: ignore[misc]
            if expires:
                await forget(here)
        await worker.until(lambda: bool(dead_letters(broker)) and are_settled_of_retries(broker))
        assert unfinished(worker.worker) == {}

    [dead] = dead_letters(broker)
    assert (dead["idempotency-dlq-reason"], dead["idempotency-dlq-attempts"]) == (b"outcome_unknown", b"4")
    assert [fields(copy)["attempt"] for copy in copies(broker, "1m")] == ["2", "3"]
    assert (bank.charges, len(bank.answers)) == (2, 6)
    assert (await record_of(here, 0)).status is IdempotencyStatus.FAILED


@virtual_time
async def test_an_effect_that_is_found_after_a_copy_is_not_repeated() -> None:
    here, broker = guarded(), broker_of(0)
    bank = Bank(Done(), errors=later(30))

    async with running(charging(bank, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled(broker) and broker.committed.get(retry_topic("1m")) == 1)
        assert worker.worker.report().tally.reconciled == 1

    assert bank.charges == 1


# Kinds of handlers.


@virtual_time
async def test_handlers_that_never_wait_for_anything_are_overtaken() -> None:
    here, broker, runs = guarded(), broker_of(*range(100)), list[int]()

    async def handle(event: ParcelSent) -> None:
        runs.append(event.number)
        if runs.count(event.number) == 1:
            raise RetryAfter(timedelta(seconds=30))

    async with running(dispatcher_of(handle, here, delayed_retries="overtake"), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: len(runs) == 200 and are_settled(broker))
        assert unfinished(worker.worker) == {}

    assert runs[:100] == list(range(100))
    assert len(copies(broker, "1m")) == 100


@virtual_time
@pytest.mark.parametrize(("whole", "copied"), [(False, 5), (True, 10)])
async def test_events_of_a_batch_are_copied_each_for_itself(whole: bool, copied: int) -> None:
    here, broker, seen = guarded(), broker_of(*range(10)), set[int]()
    router = EventRouter()

    async def handle(events: list[ParcelSent]) -> None:
        failed = [index for index, event in enumerate(events) if event.number % 2 and event.number not in seen]
        seen.update(event.number for event in events)
        error = RetryAfter(timedelta(seconds=30))
        if failed:
            raise error if whole else PartialFailureError(dict.fromkeys(failed, error))

    router.on_batch(ParcelSent, max_size=5, max_wait=0.1, name="handle", delayed_retries="overtake")(handle)
    dispatcher = IdempotentEventDispatcher(router, here.manager)
    async with running(dispatcher, broker, retry_topics=TIERS, ordering="none") as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 10 and are_settled(broker))
        assert unfinished(worker.worker) == {}
        assert worker.worker.report().tally.handled == 10

    assert len(copies(broker, "1m")) == copied


@virtual_time
async def test_one_handler_of_an_event_is_overtaken_while_another_one_blocks() -> None:
    here, broker = guarded(), broker_of(0, 1)
    first, second = Depot(errors={0: later(30)}), Depot(errors={0: later(600, 600)})
    router = EventRouter()
    router.on(ParcelSent, name="overtaken", delayed_retries="overtake")(first.handle)
    router.on(ParcelSent, name="blocking")(second.handle)

    async with running(IdempotentEventDispatcher(router, here.manager), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 2 and are_settled(broker))

    assert (first.started, second.started) == ([0, 0, 1], [0, 0, 0, 1])
    assert len(copies(broker, "1m")) == 1


@virtual_time
async def test_a_rule_discards_a_copy() -> None:
    here, depot, broker = guarded(), Depot(errors={0: [*later(30), OSError()]}), broker_of(0)

    dispatcher = dispatcher_of(depot.handle, here, delayed_retries="overtake", failures=[discard(OSError)])
    async with running(dispatcher, broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: are_settled(broker) and broker.committed.get(retry_topic("1m")) == 1)
        assert worker.worker.report().tally.discarded == 1

    assert (await record_of(here, 0)).status is IdempotencyStatus.COMPLETED


# Records and duplicates.


@virtual_time
async def test_a_record_outlives_a_delay_that_exceeds_its_ttl() -> None:
    here, depot, broker = guarded(default_ttl_seconds=60), Depot(errors={0: later(3_600, 3_600)}), broker_of(0)

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: depot.done == [0] and are_settled(broker), 3 * 3_600)

    assert (await record_of(here, 0)).attempt == 3


@virtual_time
@pytest.mark.parametrize("change", ["release", "delete"])
async def test_a_copy_runs_within_a_minute_after_an_operator_has_released_or_deleted_its_key(change: str) -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(3_600)}), broker_of(0)

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: worker.worker.report().tally.waits == 1)
        changed_at = asyncio.get_running_loop().time()
        if change == "delete":
            await forget(here)
        else:
            found = [record for record in await here.store.get([key_of(here, 0)]) if record is not None]
            assert await here.store.inner.end_leases(found) == [True]  # type: ignore[attr-defined]
        await worker.until(lambda: depot.done == [0] and are_settled(broker))

    assert asyncio.get_running_loop().time() - changed_at < 70


@virtual_time
async def test_an_event_that_is_published_twice_and_a_copy_that_is_delivered_twice_run_once_per_attempt() -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(600, 600)}), broker_of(0)

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: len(copies(broker, "10m")) == 1)
        broker.publish(parcel(0))
        [copy] = copies(broker, "10m")
        broker.put(retry_topic("10m").topic, copy.value, key=copy.key, headers=copy.headers)
        await worker.until(lambda: depot.done == [0] and are_settled(broker), 3_600)

    assert depot.started == [0, 0, 0]
    assert (await record_of(here, 0)).attempt == 3
    assert len(copies(broker, "10m")) <= 6
    assert dead_letters(broker) == []


@virtual_time
async def test_other_callers_do_not_run_work_that_waits_in_a_retry_topic() -> None:
    here, depot, broker = guarded(on_in_progress="raise", hash_keys=True), Depot(errors={0: later(600)}), broker_of(0)

    async def never() -> None:
        raise AssertionError

    async with running(overtaking(depot, here), broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: len(copies(broker, "10m")) == 1)
        with pytest.raises(ScheduledError):
            await here.manager.run(KeyResolver().resolve("handle", parcel(0)).key, never)
        await worker.until(lambda: depot.done == [0] and are_settled(broker))

    assert depot.started == [0, 0]


# Replays and signatures.


@virtual_time
async def test_retries_of_a_replay_belong_to_its_generation() -> None:
    here, depot, broker = guarded(max_attempts=2), Depot(errors={0: later(30, 30, 30)}), broker_of(0)
    replay = ReplaySettings.model_validate({"secret": SECRET})

    async with running(overtaking(depot, here), broker, replay=replay, retry_topics=TIERS) as worker:
        await worker.until(lambda: bool(dead_letters(broker)))
        put_replay(broker, replay)
        await worker.until(lambda: depot.done == [0] and are_settled_of_retries(broker))

    found = [(fields(copy)["generation"], fields(copy)["attempt"]) for copy in copies(broker, "1m")]
    assert found == [("0", "1"), ("1", "1")]


def put_replay(broker: FakeBroker, replay: ReplaySettings) -> None:
    """Replay the only dead letter."""
    [dead] = broker.values(f"{TOPIC.topic}.dlq")
    message = replay_of(dead, Settings(replay=replay))
    broker.put(message.topic, message.value, key=message.key, headers=message.headers)


@virtual_time
@pytest.mark.parametrize("kept", [True, False])
async def test_copies_are_verified_with_all_secrets(kept: bool) -> None:
    here, depot, broker = guarded(), Depot(errors={0: later(600)}), broker_of(0)
    before = ReplaySettings.model_validate({"secret": SECRET})
    after = ReplaySettings.model_validate({"secret": "t" * 32 + (f",{SECRET}" if kept else "")})
    async with running(overtaking(depot, here), broker, replay=before, retry_topics=TIERS) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    async with running(overtaking(depot, guarded(here.store)), broker, replay=after, retry_topics=TIERS) as worker:
        await worker.until(lambda: broker.committed.get(retry_topic("10m")) == 1)

    reasons = [dead["idempotency-dlq-reason"] for dead in dead_letters(broker)]
    assert (depot.done, reasons) == (([0], []) if kept else ([], [b"unverified_copy"]))


@virtual_time
async def test_the_replay_of_an_unverified_copy_runs_only_the_handler_that_has_not_succeeded() -> None:
    here, broker = guarded(), broker_of(0)
    waiting, done = Depot(errors={0: later(30)}), Depot()
    router = EventRouter()
    router.on(ParcelSent, name="waiting", delayed_retries="overtake")(waiting.handle)
    router.on(ParcelSent, name="done")(done.handle)
    dispatcher = IdempotentEventDispatcher(router, here.manager)
    replay = ReplaySettings.model_validate({"secret": SECRET})
    async with running(dispatcher, broker, retry_topics=TIERS) as worker:
        await worker.until(lambda: broker.committed.get(TOPIC) == 1)

    async with running(dispatcher, broker, replay=replay, retry_topics=TIERS) as worker:
        await worker.until(lambda: bool(dead_letters(broker)))
        put_replay(broker, replay)
        await worker.until(lambda: waiting.done == [0] and are_settled_of_retries(broker))

    assert (waiting.started, done.started) == ([0, 0], [0])


# Settings.


@virtual_time
@pytest.mark.parametrize("reset", ["latest", "none"])
async def test_a_worker_with_retry_topics_does_not_start_if_it_could_skip_copies(reset: str) -> None:
    kafka = KafkaSettings.model_validate({"auto_offset_reset": reset})

    with pytest.raises(ApplicationError, match=f'kafka.auto_offset_reset is "{reset}"'):
        async with running(overtaking(Depot(), guarded()), broker_of(), kafka=kafka, retry_topics=TIERS):
            pass
