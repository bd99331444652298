"""The protocol keeps its rules in every state of the model, and each known bug breaks one of them.

The model matches the code: every record transition that the explorer takes is compared with the real store.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from integr8s_idem.engine.work import Executed, Work
from integr8s_idem.errors import LeaseLostError
from integr8s_idem.keys import Key
from integr8s_idem.records import Completion, Failure, IdempotencyStatus, Previous, Reserved, ReserveRequest
from integr8s_idem.stores.memory import MemoryIdempotencyRepository, _Entry
from integr8s_idem.testing.virtual_time import virtual_time
from tests.model.campaign import CAMPAIGN
from tests.model.delivery import StoreCall
from tests.model.explorer import explore
from tests.model.protocol import LIBRARY, VARIANTS
from tests.model.state import Faults, Lease, Record, Request, Rule, Setup, Verb
from tests.model.store import Answer
from tests.model.surroundings import Machine
from tests.model.telling import table
from tests.support.guarded import LEASE, Job, guarded

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""The store's clock is stopped at this time, so that fences are counted from the highest one, as in the model."""

SECOND = timedelta(seconds=1)

LEASES = {
    Lease.LIVE: EPOCH + SECOND,
    Lease.SCHEDULED: EPOCH + SECOND,
    Lease.ENDED: EPOCH - SECOND,
    Lease.DUE: EPOCH - SECOND,
}
"""When a lease or a delay ends."""

TWO_WORKERS = tuple(
    Setup(2, ((0,),), faults)
    for faults in (
        Faults(crashes=1, stalls=1, unanswered=1, lost_records=1),
        Faults(crashes=1, late=1, lost_records=1),
        Faults(crashes=1, late=1, failures=1),
        Faults(late=1, lost_records=1, failures=1),
    )
)
"""Together, these cover every kind of call on every kind of record."""


def test_no_interleaving_of_three_workers_and_two_keys_breaks_a_rule() -> None:
    figures = CAMPAIGN.run(0, CAMPAIGN.in_test)

    assert figures["states"] >= CAMPAIGN.shown_in_test
    assert figures["lost"] == 0


@pytest.mark.parametrize(
    ("name", "rule"), [(name, rule) for name, variant in VARIANTS.items() for rule in variant.breaks]
)
def test_each_known_bug_is_found_with_a_shortest_counterexample(name: str, rule: Rule) -> None:
    variant = VARIANTS[name]

    found = explore(Machine(variant.setup, variant.protocol), look_for=[rule]).counterexample

    assert found is not None
    assert found.rule is rule
    lines = table(found, variant.setup).splitlines()
    assert len(lines) == 1 + len(found.moves) + 1
    assert lines[-1] == f"broken: {rule.value}"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_protocol_keeps_the_rules_that_a_variant_breaks(name: str) -> None:
    variant = VARIANTS[name]

    counterexample = explore(Machine(variant.setup, variant.protocol)).counterexample

    assert counterexample is not None
    assert counterexample.rule in variant.breaks
    assert explore(Machine(variant.setup, LIBRARY)).counterexample is None


def test_a_counterexample_is_printed_as_a_readable_table() -> None:
    variant = VARIANTS["acknowledge-in-progress"]
    found = explore(Machine(variant.setup, variant.protocol)).counterexample
    assert found is not None

    lines = [" ".join(line.split()) for line in table(found, variant.setup).splitlines()]

    assert lines == [
        "who does and then record a offsets",
        "1 W1 is given partition 0 - 0",
        "2 W1 a@0: is delivered asking - 0",
        "3 W1 a@0: asks to reserve: Reserved reserved W1 live: attempt 1, fence 1 0",
        "4 W1 crashes W1 live: attempt 1, fence 1 0",
        "5 W1 is given partition 0 W1 live: attempt 1, fence 1 0",
        "6 W1 a@0: is delivered asking W1 live: attempt 1, fence 1 0",
        "7 W1 a@0: asks to reserve: InProgress settled W1 live: attempt 1, fence 1 0",
        "8 W1 commits its offset W1 live: attempt 1, fence 1 1",
        "broken: an offset has moved over a message that is neither completed nor dead-lettered",
    ]


def test_memoizing_moves_does_not_change_the_result() -> None:
    setup = TWO_WORKERS[2]

    quick = explore(Machine(setup, LIBRARY))
    plain = explore(Machine(setup, LIBRARY), remember=False)

    assert (quick.states, quick.steps, quick.depth) == (plain.states, plain.steps, plain.depth)


async def test_every_record_transition_of_the_model_matches_the_real_store() -> None:
    calls: set[StoreCall] = set()

    for setup in TWO_WORKERS:
        machine = Machine(setup, LIBRARY)
        machine.deliveries.calls = calls
        assert explore(machine).counterexample is None

    assert len(calls) > 200
    assert {call[2].verb for call in calls} == set(Verb)
    for call in calls:
        assert await _real(call) == (call[3], call[4]), call


@virtual_time
async def test_a_run_after_a_lost_lease_counts_the_previous_run_although_its_record_was_recreated() -> None:
    here, job, work = guarded(), Job(seconds=4 * LEASE), Work(Key.of("order:1"))
    first = asyncio.create_task(here.manager.execute(work, job.with_attempt))
    await job.started.wait()
    await here.manager.delete("order:1")
    await asyncio.sleep(LEASE / 2)  # its renewal was refused, and the key reserved again
    here.store.down.add("renew")
    with pytest.raises(LeaseLostError):
        await first
    job.seconds = 0.0
    await asyncio.sleep(LEASE)

    outcome = await here.manager.execute(work, job.with_attempt)

    assert isinstance(outcome, Executed)
    assert [attempt.number for attempt in job.attempts] == [1, 2]


async def _real(call: StoreCall) -> tuple[Record | None, Answer]:
    """Return the record and the answer of `MemoryIdempotencyRepository` for one call of the model."""
    before, clock, request, _, _ = call
    store = MemoryIdempotencyRepository(clock=lambda: EPOCH)
    store._highest_fence = clock
    if before is not None:
        store._entries["a"] = _entry(before)
    answer = await _answer(store, request)
    entry = store._entries.get("a")
    return None if entry is None else _record(entry), answer


async def _answer(store: MemoryIdempotencyRepository, request: Request) -> Answer:
    token = _token(request.token)
    held = Reserved(key="a", token=token, attempt=1, fence=request.fence, lease=SECOND)
    match request.verb:
        case Verb.RESERVE:
            reserve = ReserveRequest(key="a", token=token, lease=SECOND, retention=10 * SECOND)
            return Answer(type((await store.reserve([reserve]))[0]).__name__)
        case Verb.RENEW:
            [accepted] = await store.renew([held], SECOND)
        case Verb.COMPLETE:
            [accepted] = await store.complete([Completion(reservation=held, ttl=10 * SECOND)])
        case Verb.FAIL:
            [accepted] = await store.fail([Failure(reservation=held, ttl=10 * SECOND, error="")])
        case Verb.RELEASE:
            [accepted] = await store.release([held])
        case Verb.SCHEDULE:
            [accepted] = await store.release([held], delay=SECOND, retention=10 * SECOND)
    return Answer.YES if accepted else Answer.NO


def _entry(record: Record) -> _Entry:
    processing = record.status is IdempotencyStatus.PROCESSING
    return _Entry(
        status=record.status,
        attempt=record.attempt,
        fence=record.fence,
        token=_token(record.token),
        lease_until=LEASES.get(record.lease),
        expires_at=EPOCH + 5 * SECOND,
        previous=record.previous,
        fingerprint=None,
        owner="",
        trace=None,
        settled_at=None if processing else EPOCH,
    )


def _record(entry: _Entry) -> Record:
    if entry.status is not IdempotencyStatus.PROCESSING:
        lease, token = Lease.NONE, 0
    else:
        token = int.from_bytes(entry.token, "big")
        lease = Lease.RELEASED
        if entry.lease_until is not None:
            holds, ended = (Lease.LIVE, Lease.ENDED) if token else (Lease.SCHEDULED, Lease.DUE)
            lease = holds if entry.lease_until > EPOCH else ended
    return Record(entry.status, entry.attempt, entry.fence, token, lease, Previous(entry.previous))


def _token(number: int) -> bytes:
    return number.to_bytes(16, "big")
