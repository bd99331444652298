"""The contract of stores: scheduled work."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from integr8s_idem.records import Completed, IdempotencyStatus, KeyReused, Previous, Reserved, Scheduled
from integr8s_idem.testing.store_under_test import (
    LEASE,
    RETENTION,
    SLACK,
    StoreUnderTest,
    ask,
    complete,
    lapse,
    new_key,
    new_trace,
    take,
    wish,
    write,
)

DELAY = timedelta(seconds=600)


async def schedule(
    store: StoreUnderTest, *reservations: Reserved, delay: timedelta = DELAY, retention: timedelta = RETENTION
) -> list[bool]:
    return await store.repository.release(reservations, delay=delay, retention=retention)


class SchedulingContract:
    """Part of `RepositoryContract`."""

    async def test_scheduled_work_is_reserved_when_it_is_due_and_not_before(self, store: StoreUnderTest) -> None:
        key, trace = new_key(), new_trace()
        first = await ask(store, wish(key, owner="billing@höst-7", trace=trace, fingerprint=b"f" * 16))
        assert isinstance(first, Reserved)
        assert await schedule(store, first) == [True]
        await store.advance(DELAY - timedelta(seconds=100))

        early = await ask(store, wish(key, fingerprint=b"f" * 16))
        await store.advance(timedelta(seconds=100) + SLACK)
        due = await ask(store, wish(key, fingerprint=b"f" * 16))

        assert isinstance(early, Scheduled)
        assert (early.key, early.attempt, early.owner) == (key, 1, "billing@höst-7")
        assert timedelta(seconds=100) - SLACK < early.retry_after <= timedelta(seconds=100)
        assert isinstance(due, Reserved)
        assert (due.attempt, due.previous, due.trace) == (2, Previous.RELEASED, trace)
        assert due.fence > first.fence

    async def test_the_former_owner_of_scheduled_work_cannot_write(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await schedule(store, first)

        for verb in ("renew", "complete", "fail", "release"):
            assert not await write(store, verb, first), verb

        assert isinstance(await ask(store, wish(key)), Scheduled)

    async def test_the_request_of_the_former_owner_finds_that_its_work_is_scheduled(
        self, store: StoreUnderTest
    ) -> None:
        request = wish(new_key())
        first = await ask(store, request)
        assert isinstance(first, Reserved)
        await schedule(store, first)

        assert isinstance(await ask(store, request), Scheduled)

    async def test_work_that_is_scheduled_again_after_a_lost_answer_keeps_its_time(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await schedule(store, first)
        await store.advance(timedelta(seconds=100))

        assert await schedule(store, first, first) == [True, True]

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Scheduled)
        assert verdict.retry_after <= DELAY - timedelta(seconds=100)

    async def test_only_the_owner_schedules_work(self, store: StoreUnderTest) -> None:
        lapsed, settled, gone = new_key(), new_key(), new_key()
        reservations = [await take(store, key) for key in (lapsed, settled, gone)]
        await lapse(store)
        await take(store, lapsed)
        await complete(store, reservations[1])
        await store.repository.delete([gone])

        assert await schedule(store, *reservations) == [False, False, False]

        verdicts = await store.repository.reserve([wish(settled), wish(gone)])
        assert [type(verdict) for verdict in verdicts] == [Completed, Reserved]

    async def test_a_lapsed_owner_can_schedule_its_work_until_another_takes_it_over(
        self, store: StoreUnderTest
    ) -> None:
        key = new_key()
        first = await take(store, key)
        await lapse(store)

        assert await schedule(store, first) == [True]

        assert isinstance(await ask(store, wish(key)), Scheduled)

    @pytest.mark.parametrize("is_alone", [False, True])
    async def test_scheduled_attempts_do_not_count_as_crashes(self, store: StoreUnderTest, is_alone: bool) -> None:
        key = new_key()
        await take(store, key)
        await lapse(store)
        second = await ask(store, wish(key, alone=is_alone, owner="o", trace=new_trace()))
        assert isinstance(second, Reserved)
        await schedule(store, second)
        await store.advance(DELAY + SLACK)

        third = await take(store, key)

        assert (third.attempt, third.previous) == (3, Previous.RELEASED)
        assert (third.lapsed, third.lapsed_alone) == (1, 0)

    async def test_one_of_many_callers_reserves_work_that_is_due(self, store: StoreUnderTest) -> None:
        key = new_key()
        await schedule(store, await take(store, key))
        await store.advance(DELAY + SLACK)

        verdicts = await asyncio.gather(*(ask(store, wish(key)) for _ in range(20)))

        assert sum(isinstance(verdict, Reserved) for verdict in verdicts) == 1
        assert not any(isinstance(verdict, Scheduled) for verdict in verdicts)

    async def test_a_record_outlives_its_delay_by_the_retention(self, store: StoreUnderTest) -> None:
        key, delay = new_key(), 3 * RETENTION
        await schedule(store, await take(store, key), delay=delay)
        await store.advance(delay + RETENTION - SLACK)

        kept = await take(store, key)
        await schedule(store, kept, delay=delay)
        await store.advance(delay + RETENTION + SLACK)

        assert kept.attempt == 2
        assert (await take(store, key)).attempt == 1

    async def test_a_short_delay_does_not_shorten_the_life_of_the_record(self, store: StoreUnderTest) -> None:
        key = new_key()
        await schedule(store, await take(store, key), delay=timedelta(seconds=20), retention=timedelta(0))
        await store.advance(RETENTION - 2 * SLACK)

        assert (await take(store, key)).attempt == 2

    async def test_many_works_are_scheduled_at_once(self, store: StoreUnderTest) -> None:
        reservations = [await take(store, new_key()) for _ in range(20)]
        stranger = await take(store, new_key())
        await store.repository.delete([stranger.key])

        answers = await schedule(store, *reservations, stranger)

        assert answers == [True] * 20 + [False]
        verdicts = await store.repository.reserve([wish(one.key) for one in reservations])
        assert {type(verdict) for verdict in verdicts} == {Scheduled}

    async def test_scheduled_work_is_shown_in_its_record(self, store: StoreUnderTest) -> None:
        key = new_key()
        await schedule(store, await take(store, key))

        (record,) = await store.repository.get([key])
        await store.advance(DELAY + SLACK)
        await take(store, key)
        (running,) = await store.repository.get([key])

        assert record is not None
        assert (record.status, record.is_scheduled) == (IdempotencyStatus.PROCESSING, True)
        assert record.lease_until is not None
        if record.seen_at is not None:
            assert DELAY - SLACK < record.lease_until - record.seen_at <= DELAY
        assert running is not None
        assert not running.is_scheduled

    async def test_scheduled_work_with_another_payload_is_a_reused_key(self, store: StoreUnderTest) -> None:
        key = new_key()
        await schedule(store, await take(store, key, fingerprint=b"1" * 16))

        assert isinstance(await ask(store, wish(key, fingerprint=b"2" * 16)), KeyReused)

    async def test_a_delay_of_zero_only_releases(self, store: StoreUnderTest) -> None:
        key = new_key()

        assert await schedule(store, await take(store, key), delay=timedelta(0)) == [True]

        assert (await take(store, key)).attempt == 2

    async def test_a_released_reservation_can_still_be_scheduled(self, store: StoreUnderTest) -> None:
        key = new_key()
        first = await take(store, key)
        await store.repository.release([first])

        assert await schedule(store, first, delay=LEASE) == [True]

        assert isinstance(await ask(store, wish(key)), Scheduled)

    @pytest.mark.parametrize("retention", [timedelta(0), RETENTION, timedelta.max], ids=str)
    @pytest.mark.parametrize("delay", [timedelta(days=36_500), timedelta.max - RETENTION, timedelta.max], ids=str)
    async def test_work_can_be_scheduled_for_the_longest_delay(
        self, store: StoreUnderTest, delay: timedelta, retention: timedelta
    ) -> None:
        key = new_key()

        assert await schedule(store, await take(store, key), delay=delay, retention=retention) == [True]

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Scheduled)
        assert verdict.retry_after > timedelta(days=36_499)
        (record,) = await store.repository.get([key])
        assert record is not None
        assert record.is_scheduled
