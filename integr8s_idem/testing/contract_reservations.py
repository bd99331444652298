"""The contract of stores: reservations and leases."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

from integr8s_idem.records import (
    InProgress,
    Previous,
    Reserved,
    TraceLink,
)
from integr8s_idem.testing.store_under_test import (
    LEASE,
    RETENTION,
    SLACK,
    TTL,
    StoreUnderTest,
    ask,
    complete,
    lapse,
    new_key,
    new_trace,
    take,
    wish,
)


class ReservingContract:
    """Part of `RepositoryContract`."""

    async def test_a_new_key_is_reserved_for_the_first_attempt(self, store: StoreUnderTest) -> None:
        request = wish(new_key())

        verdict = await ask(store, request)

        assert isinstance(verdict, Reserved)
        assert (verdict.key, verdict.token, verdict.attempt) == (request.key, request.token, 1)
        assert (verdict.previous, verdict.lease) == (Previous.NONE, LEASE)

    async def test_similar_keys_are_different_keys(self, store: StoreUnderTest) -> None:
        """Some databases ignore case, trailing spaces or accents when they compare strings."""
        key = new_key()

        for other in (key, key.upper(), f"{key} ", f"{key}%", f"{key}_", f"{key}%C3%A9", f"{key}e"):
            assert isinstance(await ask(store, wish(other)), Reserved), other

    async def test_one_of_a_hundred_callers_reserves_the_key(self, store: StoreUnderTest) -> None:
        key = new_key()

        verdicts = await asyncio.gather(*(ask(store, wish(key)) for _ in range(100)))

        assert sum(isinstance(verdict, Reserved) for verdict in verdicts) == 1
        assert sum(isinstance(verdict, InProgress) for verdict in verdicts) == 99

    async def test_a_second_caller_gets_the_owner_and_the_rest_of_the_lease(self, store: StoreUnderTest) -> None:
        key = new_key()
        await ask(store, wish(key, owner="billing@höst-7"))
        await store.advance(timedelta(seconds=10))

        verdict = await ask(store, wish(key))

        assert isinstance(verdict, InProgress)
        assert (verdict.attempt, verdict.owner) == (1, "billing@höst-7")
        assert timedelta(seconds=20) - SLACK < verdict.retry_after <= timedelta(seconds=20)

    async def test_one_of_two_callers_takes_over_an_expired_lease(self, store: StoreUnderTest) -> None:
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

    @pytest.mark.parametrize("fingerprint", [None, b"f" * 16])
    @pytest.mark.parametrize("end", ["lapse", "release"])
    async def test_the_next_attempt_gets_the_trace_of_the_last_one(
        self, store: StoreUnderTest, end: str, fingerprint: bytes | None
    ) -> None:
        key, traces = new_key(), [new_trace() for _ in range(3)]
        verdicts = []
        for trace in traces:
            verdict = await ask(store, wish(key, trace=trace, fingerprint=fingerprint, alone=trace is traces[1]))
            assert isinstance(verdict, Reserved)
            verdicts.append(verdict)
            if end == "release":
                await store.repository.release([verdict])
            else:
                await lapse(store)

        assert [verdict.trace for verdict in verdicts] == [None, *traces[:2]]

    async def test_the_next_attempt_gets_no_trace_if_the_last_one_had_none(self, store: StoreUnderTest) -> None:
        key = new_key()
        await ask(store, wish(key, trace=new_trace()))
        await lapse(store)
        await take(store, key)
        await lapse(store)

        third = await ask(store, wish(key, trace=new_trace()))

        assert isinstance(third, Reserved)
        assert (third.previous, third.trace) == (Previous.LAPSED, None)

    @pytest.mark.parametrize("end", ["expire", "settle and expire", "delete"])
    async def test_a_record_that_is_gone_leaves_no_trace(self, store: StoreUnderTest, end: str) -> None:
        key = new_key()
        await ask(store, wish(key, trace=new_trace()))
        await lapse(store)
        second = await ask(store, wish(key, trace=new_trace()))
        assert isinstance(second, Reserved)
        if end == "delete":
            await store.repository.delete([key])
        elif end == "expire":
            await store.advance(RETENTION + SLACK)
        else:
            await complete(store, second)
            await store.advance(TTL + SLACK)

        again = await ask(store, wish(key, trace=new_trace()))

        assert isinstance(again, Reserved)
        assert (again.attempt, again.previous, again.trace) == (1, Previous.NONE, None)

    async def test_a_repeated_request_never_gets_its_own_trace(self, store: StoreUnderTest) -> None:
        """The store may have replaced the trace of the previous attempt by then: no trace is a valid answer."""
        key, trace = new_key(), new_trace()
        await ask(store, wish(key, trace=trace))
        await lapse(store)
        request = wish(key, trace=new_trace())
        first = await ask(store, request)

        again = [await ask(store, request), await ask(store, replace(request, alone=True))]

        assert isinstance(first, Reserved)
        assert first.trace == trace
        for verdict in again:
            assert verdict in (first, replace(first, trace=None))

    async def test_each_key_of_a_batch_gets_its_own_trace(self, store: StoreUnderTest) -> None:
        keys = [new_key() for _ in range(4)]
        traces = [new_trace(), None, new_trace(), None]
        await store.repository.reserve(
            [wish(key, trace=trace) for key, trace in zip(keys[:3], traces[:3], strict=True)]
        )
        await lapse(store)

        verdicts = await store.repository.reserve([wish(key, trace=new_trace()) for key in keys])

        assert [verdict.trace for verdict in verdicts if isinstance(verdict, Reserved)] == traces

    async def test_lapsed_attempts_are_counted_and_released_ones_are_not(self, store: StoreUnderTest) -> None:
        key = new_key()
        await take(store, key)
        await lapse(store)
        second = await take(store, key)
        await store.repository.release([second])
        third = await take(store, key)
        await lapse(store)

        fourth = await take(store, key)

        found = [(each.attempt, each.lapsed, each.lapsed_alone) for each in (second, third, fourth)]
        assert found == [(2, 1, 0), (3, 1, 0), (4, 2, 0)]

    async def test_lapsed_isolated_attempts_are_counted_separately(self, store: StoreUnderTest) -> None:
        key = new_key()
        await ask(store, wish(key, alone=True, owner="billing@höst-7", fingerprint=b"f" * 16))
        await lapse(store)
        second = await take(store, key)
        await lapse(store)
        await ask(store, wish(key, alone=True))
        await lapse(store)

        fourth = await take(store, key)

        assert (second.attempt, second.lapsed, second.lapsed_alone) == (2, 1, 1)
        assert (fourth.attempt, fourth.lapsed, fourth.lapsed_alone) == (4, 3, 2)

    async def test_an_owner_marks_its_attempt_as_isolated_by_reserving_again(self, store: StoreUnderTest) -> None:
        key, trace = new_key(), TraceLink(b"t" * 16, b"s" * 8)
        await take(store, key)
        await lapse(store)
        request = wish(key, owner="billing@höst-7")
        first = await ask(store, request)
        await store.advance(LEASE - SLACK)

        alone = await ask(store, replace(request, alone=True, trace=trace))
        (record,) = await store.repository.get([key])
        await store.advance(LEASE - SLACK)
        held = await ask(store, wish(key))
        again = await ask(store, replace(request, alone=True))
        await lapse(store)
        next_one = await take(store, key)

        assert alone == first == again
        assert isinstance(held, InProgress)
        assert held.owner == "billing@höst-7"
        assert record is not None
        assert (record.attempt, record.lapsed, record.lapsed_alone, record.alone) == (2, 1, 0, True)
        assert record.owner == "billing@höst-7"
        assert (next_one.attempt, next_one.lapsed, next_one.lapsed_alone) == (3, 2, 1)

    async def test_an_owner_can_clear_the_mark_of_isolation(self, store: StoreUnderTest) -> None:
        request = wish(new_key(), alone=True)
        await ask(store, request)
        await ask(store, replace(request, alone=False))
        await lapse(store)

        following = await take(store, request.key)

        assert (following.lapsed, following.lapsed_alone) == (1, 0)

    async def test_the_attempt_counts_survive_a_renewal_and_end_with_the_record(self, store: StoreUnderTest) -> None:
        key = new_key()
        await take(store, key)
        await lapse(store)
        second = await take(store, key)
        assert await store.repository.renew([second], LEASE) == [True]
        await lapse(store)
        third = await take(store, key)
        assert await store.repository.delete([key]) == 1

        anew = await take(store, key)

        assert (third.lapsed, anew.attempt, anew.lapsed, anew.lapsed_alone) == (2, 1, 0, 0)

    async def test_a_released_key_can_be_reserved_and_its_attempts_are_counted(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)

        assert await store.repository.release([first]) == [True]

        second = await take(store, key)
        assert (second.attempt, second.previous) == (2, Previous.RELEASED)
        assert second.fence > first.fence

    async def test_a_repeated_release_is_true_and_does_not_affect_the_next_owner(self, store: StoreUnderTest) -> None:
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

    async def test_a_renewed_lease_counts_from_the_renewal(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await store.advance(timedelta(seconds=20))

        assert await store.repository.renew([first], LEASE) == [True]

        await store.advance(timedelta(seconds=20))
        assert isinstance(await ask(store, wish(key)), InProgress)

    async def test_an_expired_lease_can_be_renewed_without_a_takeover(self, store: StoreUnderTest) -> None:
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

    async def test_fences_grow_across_release_takeover_expiry_and_deletion(self, store: StoreUnderTest) -> None:
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
