"""What every store must do: a test suite that a store runs over itself.

    from integr8s_idem.testing.contract import RepositoryContract, StoreUnderTest


    class TestMyStore(RepositoryContract):
        @pytest.fixture
        async def store(self) -> AsyncIterator[StoreUnderTest]:
            ...
            yield StoreUnderTest(repository, advance)

Needs pytest with an asyncio plugin that runs `async def` tests (pytest-asyncio in auto mode),
and hypothesis.  The store need not be empty: every test has keys of its own.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta

import pytest

from integr8s_idem.errors import CorruptRecordError
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    Failed,
    Failure,
    IdempotencyStatus,
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
    Verdict,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.testing.histories import HistorySize, check_histories

__all__ = ["HistorySize", "RepositoryContract", "StoreUnderTest"]

LEASE = timedelta(seconds=30)
RETENTION = timedelta(seconds=900)
TTL = timedelta(seconds=3_600)
SLACK = timedelta(seconds=5)
"""Real time that may pass within a test."""
RESULT = StoredResult(b'{"receipt": 1}')


@dataclass(frozen=True, slots=True)
class StoreUnderTest:
    """A store, and what the suite must be able to do with it beside the Protocol."""

    repository: IdempotencyRepository
    advance: Callable[[timedelta], Awaitable[None]]
    """Let that much time pass for all leases and expiries: a virtual clock, or records made older."""
    spoil: Callable[[str], Awaitable[None]] | None = None
    """Put something unreadable under a key; `None` if this store cannot hold such a thing."""


def new_key() -> str:
    return f"contract:{uuid.uuid4().hex}:work"


def wish(
    key: str,
    *,
    token: bytes | None = None,
    lease: timedelta = LEASE,
    retention: timedelta = RETENTION,
    fingerprint: bytes | None = None,
    owner: str = "",
    trace: TraceLink | None = None,
) -> ReserveRequest:
    return ReserveRequest(
        key=key,
        token=token or os.urandom(16),
        lease=lease,
        retention=retention,
        fingerprint=fingerprint,
        owner=owner,
        trace=trace,
    )


async def ask(store: StoreUnderTest, request: ReserveRequest) -> Verdict:
    (verdict,) = await store.repository.reserve([request])
    return verdict


async def take(store: StoreUnderTest, key: str, *, fingerprint: bytes | None = None) -> Reserved:
    verdict = await ask(store, wish(key, fingerprint=fingerprint))
    assert isinstance(verdict, Reserved)
    return verdict


async def complete(store: StoreUnderTest, reservation: Reserved, result: StoredResult | None = RESULT) -> bool:
    (answer,) = await store.repository.complete([Completion(reservation=reservation, ttl=TTL, result=result)])
    return answer


async def fail(store: StoreUnderTest, reservation: Reserved, error: str = "no such account") -> bool:
    (answer,) = await store.repository.fail([Failure(reservation=reservation, ttl=TTL, error=error)])
    return answer


async def lapse(store: StoreUnderTest) -> None:
    """Let a lease end, and keep the record."""
    await store.advance(LEASE + SLACK)


class RepositoryContract:
    """Inherit, and give a fixture `store`.  Set `histories` to spend less or more on random histories."""

    histories = HistorySize()

    async def test_a_new_key_is_reserved_for_the_first_attempt(self, store: StoreUnderTest) -> None:
        request = wish(new_key())

        verdict = await ask(store, request)

        assert isinstance(verdict, Reserved)
        assert (verdict.key, verdict.token, verdict.attempt) == (request.key, request.token, 1)
        assert (verdict.previous, verdict.lease) == (Previous.NONE, LEASE)

    async def test_of_a_hundred_reservers_one_gets_the_key(self, store: StoreUnderTest) -> None:
        key = new_key()

        verdicts = await asyncio.gather(*(ask(store, wish(key)) for _ in range(100)))

        assert sum(isinstance(verdict, Reserved) for verdict in verdicts) == 1
        assert sum(isinstance(verdict, InProgress) for verdict in verdicts) == 99

    async def test_a_second_reserver_learns_who_holds_the_key_and_for_how_long(self, store: StoreUnderTest) -> None:
        key = new_key()
        await ask(store, wish(key, owner="billing@höst-7"))
        await store.advance(timedelta(seconds=10))

        verdict = await ask(store, wish(key))

        assert isinstance(verdict, InProgress)
        assert (verdict.attempt, verdict.owner) == (1, "billing@höst-7")
        assert timedelta(seconds=20) - SLACK < verdict.retry_after <= timedelta(seconds=20)

    async def test_of_two_takers_at_the_end_of_a_lease_one_wins(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await lapse(store)

        verdicts = await asyncio.gather(ask(store, wish(key)), ask(store, wish(key)))

        (winner,) = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        (loser,) = [verdict for verdict in verdicts if isinstance(verdict, InProgress)]
        assert (winner.attempt, winner.previous, loser.attempt) == (2, Previous.LAPSED, 2)
        assert winner.fence > first.fence

    async def test_a_reserve_whose_answer_was_lost_finds_its_reservation(self, store: StoreUnderTest) -> None:
        request = wish(new_key())
        first = await ask(store, request)
        await store.advance(timedelta(seconds=20))

        again = await ask(store, request)
        await store.advance(timedelta(seconds=20))

        assert again == first
        assert isinstance(await ask(store, wish(request.key)), InProgress)

    async def test_a_takeover_whose_answer_was_lost_is_still_a_takeover(self, store: StoreUnderTest) -> None:
        key = new_key()
        await take(store, key)
        await lapse(store)
        request = wish(key)
        first = await ask(store, request)

        again = await ask(store, request)

        assert again == first
        assert isinstance(again, Reserved)
        assert (again.attempt, again.previous) == (2, Previous.LAPSED)

    async def test_a_released_key_goes_to_the_next_with_its_attempts_counted(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)

        assert await store.repository.release([first]) == [True]

        second = await take(store, key)
        assert (second.attempt, second.previous) == (2, Previous.RELEASED)
        assert second.fence > first.fence

    async def test_a_release_repeated_is_true_and_never_touches_the_next_owner(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await store.repository.release([first])
        assert await store.repository.release([first]) == [True]
        await take(store, key)

        assert await store.repository.release([first]) == [False]

        assert isinstance(await ask(store, wish(key)), InProgress)

    async def test_a_released_reservation_is_not_renewed(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await store.repository.release([first])

        assert await store.repository.renew([first], LEASE) == [False]

        assert (await take(store, key)).attempt == 2

    async def test_a_renewed_lease_holds_from_then_on(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await store.advance(timedelta(seconds=20))

        assert await store.repository.renew([first], LEASE) == [True]

        await store.advance(timedelta(seconds=20))
        assert isinstance(await ask(store, wish(key)), InProgress)

    async def test_a_lease_that_has_ended_is_renewed_while_nobody_took_the_key(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await lapse(store)

        assert await store.repository.renew([first], LEASE) == [True]

        assert isinstance(await ask(store, wish(key)), InProgress)

    async def test_a_renewal_beyond_the_retention_keeps_the_record(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)

        await store.repository.renew([first], 2 * RETENTION)
        await store.advance(RETENTION + SLACK)

        assert isinstance(await ask(store, wish(key)), InProgress)

    async def test_a_completed_key_answers_with_its_result(self, store: StoreUnderTest) -> None:
        key, trace = new_key(), TraceLink(os.urandom(16), os.urandom(8))
        reserved = await ask(store, wish(key, trace=trace, fingerprint=b"f" * 16))
        assert isinstance(reserved, Reserved)

        assert await complete(store, reserved)

        verdict = await ask(store, wish(key, fingerprint=b"f" * 16))
        assert isinstance(verdict, Completed)
        assert (verdict.attempt, verdict.result, verdict.result_dropped) == (1, RESULT, False)
        assert verdict.trace == trace

    @pytest.mark.parametrize(
        "result",
        [
            None,
            StoredResult(b""),
            StoredResult(b"null"),
            StoredResult(b"0"),
            StoredResult(b"false"),
            StoredResult(b"[]"),
            StoredResult(b"", "text/plain; charset=utf-8"),
            StoredResult(bytes(range(256)), "application/octet-stream"),
            StoredResult(b"\0\0", ""),
            StoredResult(b"x" * 1_048_576, "text/plain"),
        ],
        ids=lambda result: "none" if result is None else f"{len(result.body)}-{result.content_type}",
    )
    async def test_a_result_comes_back_byte_for_byte(self, store: StoreUnderTest, result: StoredResult | None) -> None:
        key = new_key()

        assert await complete(store, await take(store, key), result)

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Completed)
        assert verdict.result == result

    async def test_a_dropped_result_is_told_from_none(self, store: StoreUnderTest) -> None:
        key = new_key()
        completion = Completion(reservation=await take(store, key), ttl=TTL, result_dropped=True)

        await store.repository.complete([completion])

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Completed)
        assert (verdict.result, verdict.result_dropped) == (None, True)

    async def test_a_completion_repeated_is_true_and_changes_nothing(self, store: StoreUnderTest) -> None:
        key = new_key()
        reserved = await take(store, key)
        await complete(store, reserved)
        before = await store.repository.get([key])

        assert await complete(store, reserved, StoredResult(b"other"))

        after = await store.repository.get([key])
        assert before[0] is not None
        assert after[0] is not None
        assert (after[0].result, after[0].settled_at) == (RESULT, before[0].settled_at)

    async def test_a_failure_repeated_is_true_and_changes_nothing(self, store: StoreUnderTest) -> None:
        key = new_key()
        reserved = await take(store, key)
        await fail(store, reserved, "löst")

        assert await fail(store, reserved, "other")

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Failed)
        assert (verdict.attempt, verdict.error) == (1, "löst")

    async def test_an_outcome_is_not_turned_into_the_other(self, store: StoreUnderTest) -> None:
        completed, failed = await take(store, new_key()), await take(store, new_key())
        await complete(store, completed)
        await fail(store, failed)

        assert not await fail(store, completed)
        assert not await complete(store, failed)

        assert isinstance(await ask(store, wish(completed.key)), Completed)
        assert isinstance(await ask(store, wish(failed.key)), Failed)

    async def test_a_completion_after_the_lease_counts_while_nobody_took_the_key(self, store: StoreUnderTest) -> None:
        reserved = await take(store, new_key())
        await lapse(store)

        assert await complete(store, reserved)

        assert isinstance(await ask(store, wish(reserved.key)), Completed)

    async def test_a_completion_of_a_vanished_record_is_false(self, store: StoreUnderTest) -> None:
        reserved = await take(store, new_key())
        await store.repository.delete([reserved.key])

        assert not await complete(store, reserved)
        assert not await fail(store, reserved)

        assert await store.repository.get([reserved.key]) == [None]

    @pytest.mark.parametrize("verb", ["complete", "fail", "renew", "release"])
    async def test_a_zombie_changes_nothing(self, store: StoreUnderTest, verb: str) -> None:
        key = new_key()
        zombie = await take(store, key)
        await lapse(store)
        owner = await take(store, key)

        assert not await _write(store, verb, zombie)

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, InProgress)
        assert verdict.attempt == 2
        assert verdict.retry_after > LEASE - SLACK
        assert await complete(store, owner)

    @pytest.mark.parametrize("verb", ["complete", "fail", "renew", "release"])
    @pytest.mark.parametrize("outcome", ["complete", "fail"])
    async def test_a_zombie_leaves_the_outcome_of_its_successor(
        self, store: StoreUnderTest, verb: str, outcome: str
    ) -> None:
        key = new_key()
        zombie = await take(store, key)
        await lapse(store)
        owner = await take(store, key)
        await _write(store, outcome, owner)
        before = await store.repository.get([key])

        assert not await _write(store, verb, zombie)

        (after,) = await store.repository.get([key])
        assert before[0] is not None
        assert after is not None
        assert (after.status, after.fence, after.result) == (before[0].status, owner.fence, before[0].result)

    async def test_fences_grow_over_release_takeover_expiry_and_deletion(self, store: StoreUnderTest) -> None:
        key = new_key()
        fences = [(first := await take(store, key)).fence]
        await store.repository.release([first])
        fences.append((await take(store, key)).fence)
        await lapse(store)
        fences.append((await take(store, key)).fence)
        await store.advance(RETENTION + SLACK)
        fences.append((await take(store, key)).fence)
        await store.repository.delete([key])
        fences.append((await take(store, key)).fence)

        assert fences == sorted(set(fences))
        assert max(fences) < 2**53

    @pytest.mark.parametrize("state", ["processing", "lapsed", "released", "completed", "failed"])
    async def test_another_payload_under_a_known_key_is_refused(self, store: StoreUnderTest, state: str) -> None:
        key = new_key()
        reserved = await take(store, key, fingerprint=b"a" * 16)
        if state == "lapsed":
            await lapse(store)
        elif state != "processing":
            await _write(store, {"released": "release", "completed": "complete", "failed": "fail"}[state], reserved)

        verdict = await ask(store, wish(key, fingerprint=b"b" * 16))

        assert verdict == KeyReused(key=key, stored=b"a" * 16, offered=b"b" * 16)
        assert not isinstance(await ask(store, wish(key)), KeyReused)

    async def test_answers_come_in_the_order_of_the_questions(self, store: StoreUnderTest) -> None:
        done, held, fresh = new_key(), new_key(), new_key()
        await complete(store, await take(store, done))
        await take(store, held)

        verdicts = await store.repository.reserve([wish(key) for key in (fresh, done, held, done)])

        assert [type(verdict) for verdict in verdicts] == [Reserved, Completed, InProgress, Completed]
        assert [verdict.key for verdict in verdicts] == [fresh, done, held, done]

    async def test_one_key_twice_in_a_batch_is_answered_as_two_callers(self, store: StoreUnderTest) -> None:
        key = new_key()

        first, second = await store.repository.reserve([wish(key), wish(key)])

        assert isinstance(first, Reserved)
        assert isinstance(second, InProgress)
        completion = Completion(reservation=first, ttl=TTL, result=RESULT)
        assert await store.repository.complete([completion, completion]) == [True, True]

    async def test_a_batch_of_thousands_is_answered_whole(self, store: StoreUnderTest) -> None:
        keys = [new_key() for _ in range(2_500)]

        verdicts = await store.repository.reserve([wish(key) for key in keys])

        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        assert [verdict.key for verdict in reserved] == keys
        assert all(await store.repository.renew(reserved, LEASE))
        assert all(await store.repository.complete([Completion(reservation=one, ttl=TTL) for one in reserved]))
        assert await store.repository.release(reserved) == [False] * len(keys)
        assert await store.repository.delete(keys) == len(keys)

    async def test_large_results_come_back_in_one_batch(self, store: StoreUnderTest) -> None:
        bodies = {new_key(): bytes([number]) * 1_048_576 for number in range(12)}
        completions = [
            Completion(reservation=await take(store, key), ttl=TTL, result=StoredResult(body))
            for key, body in bodies.items()
        ]
        assert all(await store.repository.complete(completions))

        verdicts = await store.repository.reserve([wish(key) for key in bodies])

        assert [v.result.body for v in verdicts if isinstance(v, Completed) and v.result] == list(bodies.values())
        records = await store.repository.get(list(bodies))
        assert [r.result.body for r in records if r is not None and r.result] == list(bodies.values())

    async def test_empty_batches_are_answered_with_nothing(self, store: StoreUnderTest) -> None:
        repository = store.repository

        assert await repository.reserve([]) == []
        assert await repository.complete([]) == await repository.fail([]) == []
        assert await repository.renew([], LEASE) == await repository.release([]) == []
        assert await repository.get([]) == []
        assert await repository.delete([]) == 0

    async def test_a_record_in_work_lives_as_long_as_its_retention(self, store: StoreUnderTest) -> None:
        request = wish(new_key(), owner="billing@host-7", fingerprint=b"f" * 16)
        await ask(store, request)

        (record,) = await store.repository.get([request.key])

        assert record is not None
        assert (record.status, record.attempt, record.owner) == (IdempotencyStatus.PROCESSING, 1, "billing@host-7")
        assert (record.fingerprint, record.settled_at) == (b"f" * 16, None)
        assert record.lease_until is not None
        assert record.expires_at is not None
        assert abs(record.expires_at - record.lease_until - (RETENTION - LEASE)) < SLACK
        await store.advance(RETENTION + SLACK)
        assert await store.repository.get([request.key]) == [None]

    @pytest.mark.parametrize("verb", ["complete", "fail"])
    async def test_an_outcome_lives_as_long_as_its_ttl(self, store: StoreUnderTest, verb: str) -> None:
        key = new_key()
        await _write(store, verb, await take(store, key))

        (record,) = await store.repository.get([key])

        assert record is not None
        assert record.settled_at is not None
        assert record.expires_at is not None
        assert record.lease_until is None
        assert abs(record.expires_at - record.settled_at - TTL) < SLACK
        await store.advance(TTL + SLACK)
        assert (await take(store, key)).attempt == 1

    @pytest.mark.parametrize("verb", ["renew", "release"])
    async def test_renewed_and_released_records_keep_an_expiry(self, store: StoreUnderTest, verb: str) -> None:
        key = new_key()
        await _write(store, verb, await take(store, key))

        (record,) = await store.repository.get([key])

        assert record is not None
        assert record.expires_at is not None
        assert (record.lease_until is None) == (verb == "release")
        await store.advance(RETENTION + SLACK)
        assert await store.repository.get([key]) == [None]

    async def test_a_retention_below_the_lease_never_shortens_the_lease(self, store: StoreUnderTest) -> None:
        key = new_key()
        await ask(store, wish(key, retention=timedelta(seconds=1)))

        await store.advance(timedelta(seconds=10))

        assert isinstance(await ask(store, wish(key)), InProgress)

    async def test_a_deleted_key_starts_anew(self, store: StoreUnderTest) -> None:
        key = new_key()
        await complete(store, await take(store, key))

        assert await store.repository.delete([key, new_key()]) == 1

        assert (await take(store, key)).attempt == 1

    async def test_a_scan_sees_what_starts_with_the_prefix(self, store: StoreUnderTest) -> None:
        root = f"contract:{uuid.uuid4().hex}:a*b?[c]\\"
        inside, outside = [f"{root}{number}" for number in range(5)], root.replace("*", "x") + "1"
        for key in [*inside, outside]:
            await take(store, key)

        seen = [record.key async for record in store.repository.scan(root)]

        assert sorted(seen) == inside

    async def test_active_keys_are_those_with_a_lease(self, store: StoreUnderTest) -> None:
        root = f"contract:{uuid.uuid4().hex}:"
        await take(store, root + "lapsed")
        await lapse(store)
        held = [await take(store, f"{root}{number}") for number in range(5)]
        await complete(store, held[0])
        await fail(store, held[1])
        await store.repository.release([held[2]])

        assert await store.repository.count_active(root) == 2

    async def test_an_unreadable_record_spoils_no_batch(self, store: StoreUnderTest) -> None:
        if store.spoil is None:
            pytest.skip("this store cannot hold an unreadable record")
        root = f"contract:{uuid.uuid4().hex}:"
        bad, good = root + "bad", root + "good"
        lost = await take(store, bad)
        await store.spoil(bad)

        first, second = await store.repository.reserve([wish(bad), wish(good)])

        assert isinstance(first, Corrupt)
        assert first.reason
        assert isinstance(second, Reserved)
        assert await store.repository.renew([lost, second], LEASE) == [False, True]
        completions = [Completion(reservation=reserved, ttl=TTL) for reserved in (lost, second)]
        assert await store.repository.complete(completions) == [False, True]
        with pytest.raises(CorruptRecordError):
            await store.repository.get([good, bad])
        assert [record.key async for record in store.repository.scan(root)] == [good]
        assert await store.repository.count_active(root) == 0
        assert await store.repository.delete([bad]) == 1

    async def test_a_ping_tells_kind_and_latency(self, store: StoreUnderTest) -> None:
        health = await store.repository.ping()

        assert health.kind
        assert health.latency >= timedelta(0)

    async def test_any_history_agrees_with_the_model(self, store: StoreUnderTest) -> None:
        await check_histories(store.repository, store.advance, self.histories)


async def _write(store: StoreUnderTest, verb: str, reservation: Reserved) -> bool:
    if verb == "complete":
        return await complete(store, reservation)
    if verb == "fail":
        return await fail(store, reservation)
    if verb == "renew":
        return (await store.repository.renew([reservation], LEASE))[0]
    return (await store.repository.release([reservation]))[0]
