"""The contract of stores: reservations and leases."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest

from integr8s_idem.records import (
    InProgress,
    KeyReused,
    Previous,
    Reserved,
    TraceLink,
)
from integr8s_idem.testing.store_under_test import (
    LEASE,
    RETENTION,
    SLACK,
    StoreUnderTest,
    ask,
    lapse,
    new_key,
    take,
    wish,
    write,
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

    @pytest.mark.parametrize("state", ["processing", "lapsed", "released", "completed", "failed"])
    async def test_a_known_key_with_another_payload_is_rejected(self, store: StoreUnderTest, state: str) -> None:
        key = new_key()
        reserved = await take(store, key, fingerprint=b"a" * 16)
        if state == "lapsed":
            await lapse(store)
        elif state != "processing":
            await write(store, {"released": "release", "completed": "complete", "failed": "fail"}[state], reserved)

        verdict = await ask(store, wish(key, fingerprint=b"b" * 16))

        assert verdict == KeyReused(key=key, stored=b"a" * 16, offered=b"b" * 16)
        assert not isinstance(await ask(store, wish(key)), KeyReused)
