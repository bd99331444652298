"""The judges of the campaigns can fail: each of their demands, broken once."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta

import pytest

from integr8s_idem import Attempt, IdempotencyRecord, IdempotencyStatus
from integr8s_idem.records import Completion, Reserved, ReserveRequest, StoredResult
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from tests.campaigns.figures import ViolationError
from tests.crashes.judging import CompletedKeys
from tests.simulation.bugs import BUGS
from tests.simulation.world import simulate
from tests.support.effects import Effects

HOUR = timedelta(hours=1)


def attempt(number: int = 1, fence: int = 1, key: str = "idempotency:billing:7") -> Attempt:
    return Attempt(key=key, number=number, fence=fence, deadline=0.0)


def record(fence: int, receipt: str = "anything") -> IdempotencyRecord:
    result = StoredResult(f'"{receipt}"'.encode())
    return IdempotencyRecord(
        key=attempt().key, status=IdempotencyStatus.COMPLETED, attempt=1, fence=fence, result=result
    )


def run_once(effects: Effects, told: Attempt) -> None:
    effects.note("begin", "order-7", told)
    effects.apply("order-7", told)


@pytest.fixture
def prepared(effects: Effects) -> Effects:
    effects.prepare()
    return effects


# The sink and the records.


def test_a_work_under_two_keys_is_twice_in_the_sink(prepared: Effects) -> None:
    run_once(prepared, attempt())
    run_once(prepared, attempt(2, 2, key="idempotency:billing:7-changed"))

    with pytest.raises(ViolationError, match=r"twice in the fenced sink \['order-7'\]"):
        prepared.judge({"order-7"})


def test_a_work_that_ran_twice_under_one_key_is_once_in_the_sink(prepared: Effects) -> None:
    run_once(prepared, attempt(1, 1))
    run_once(prepared, attempt(2, 2))

    figures = prepared.judge({"order-7"})

    assert figures == {"events": 1, "lost": 0, "repeats": 1, "fenced_repeats": 0}


def test_a_completion_by_a_run_that_was_overtaken_is_a_violation(prepared: Effects) -> None:
    run_once(prepared, attempt(1, 1))
    prepared.note("begin", "order-7", attempt(2, 2))

    with pytest.raises(ViolationError, match="overtaken"):
        prepared.judge_records([record(fence=1)])


def test_a_result_of_a_run_that_was_overtaken_is_a_violation(prepared: Effects) -> None:
    """What a store does that believes anybody: the record is the second run's, the result in it the first one's."""
    run_once(prepared, attempt(1, 1))
    prepared.note("begin", "order-7", attempt(2, 2))

    with pytest.raises(ViolationError, match="overtaken"):
        prepared.judge_records([record(2, prepared.receipt("order-7", attempt(1, 1)))])
    prepared.judge_records([record(2, prepared.receipt("order-7", attempt(2, 2)))])


def test_a_completion_under_a_reservation_made_anew_is_counted(prepared: Effects) -> None:
    run_once(prepared, attempt(1, 1))

    figures = prepared.judge_records([record(fence=2)])

    assert figures == {"completed": 1, "completed_anew": 1}


def test_a_completion_without_an_effect_is_a_violation(prepared: Effects) -> None:
    prepared.note("begin", "order-7", attempt())

    with pytest.raises(ViolationError, match="completed without an effect"):
        prepared.judge_records([record(fence=1)])


# Keys that are completed.


async def completed(store: MemoryIdempotencyRepository) -> Attempt:
    """Of a run whose completion the store has believed."""
    wish = ReserveRequest(key=attempt().key, token=secrets.token_bytes(16), lease=HOUR, retention=HOUR)
    [reserved] = await store.reserve([wish])
    assert isinstance(reserved, Reserved)
    assert await store.complete([Completion(reservation=reserved, ttl=HOUR)]) == [True]
    return attempt(reserved.attempt, reserved.fence)


async def test_a_completed_record_that_is_given_out_again_is_a_violation(prepared: Effects) -> None:
    store = MemoryIdempotencyRepository()
    keys = CompletedKeys(store, prepared, "idempotency:")
    told = await completed(store)
    run_once(prepared, told)
    await keys.look()

    await store.delete([told.key])
    await completed(store)

    with pytest.raises(ViolationError, match="no longer as it was"):
        await keys.look()


@pytest.mark.parametrize("later", [0, 1])
async def test_a_run_after_the_completion_is_a_violation(prepared: Effects, later: int) -> None:
    store = MemoryIdempotencyRepository()
    keys = CompletedKeys(store, prepared, "idempotency:")
    told = await completed(store)
    run_once(prepared, told)
    await keys.look()

    run_once(prepared, attempt(told.number + later, told.fence + later))

    with pytest.raises(ViolationError, match="was completed by fence"):
        await keys.look()


async def test_a_run_that_was_overtaken_may_begin_late_unless_nobody_lived(prepared: Effects) -> None:
    store = MemoryIdempotencyRepository()
    keys = CompletedKeys(store, prepared, "idempotency:")
    told = await completed(store)
    run_once(prepared, told)
    await keys.look()

    run_once(prepared, attempt(1, told.fence - 2))
    await keys.look(nobody_lives=True)
    run_once(prepared, attempt(1, told.fence - 1))

    with pytest.raises(ViolationError, match="was completed after 2 runs"):
        await keys.look()


# The simulation's rule E1.


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("bug", "said"),
    [("key_made_again", "is in the sink more than once"), ("no_token_check", "though a run by")],
)
def test_a_broken_sink_is_found_by_the_rule_for_it(
    bug: str, said: str, record_property: Callable[[str, object], None]
) -> None:
    with BUGS[bug]():
        found = next(
            told
            for seed in range(1_000)
            for told in simulate(seed).violations
            if told.startswith("E1") and said in told
        )

    record_property("found", found)
