"""The contract of stores: who gets a key, and until when."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from integr8s_idem.records import (
    InProgress,
    KeyReused,
    Previous,
    Reserved,
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

    async def test_keys_that_look_alike_are_different_keys(self, store: StoreUnderTest) -> None:
        """Databases like to compare without case, without spaces at the end, or without accents."""
        key = new_key()

        for other in (key, key.upper(), f"{key} ", f"{key}%", f"{key}_", f"{key}%C3%A9", f"{key}e"):
            assert isinstance(await ask(store, wish(other)), Reserved), other

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
            await write(store, {"released": "release", "completed": "complete", "failed": "fail"}[state], reserved)

        verdict = await ask(store, wish(key, fingerprint=b"b" * 16))

        assert verdict == KeyReused(key=key, stored=b"a" * 16, offered=b"b" * 16)
        assert not isinstance(await ask(store, wish(key)), KeyReused)
