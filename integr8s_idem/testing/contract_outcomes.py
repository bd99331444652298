"""The contract of stores: outcomes, and writes of former owners."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from msgspec.structs import replace

from integr8s_idem.records import (
    Completed,
    Completion,
    Failed,
    Failure,
    IdempotencyStatus,
    InProgress,
    Reserved,
    StoredResult,
)
from integr8s_idem.testing.store_under_test import (
    LEASE,
    RESULT,
    SLACK,
    TTL,
    StoreUnderTest,
    ask,
    complete,
    fail,
    lapse,
    new_key,
    new_trace,
    take,
    wish,
    write,
)


class SettlingContract:
    """Part of `RepositoryContract`."""

    async def test_a_completed_key_answers_with_its_result(self, store: StoreUnderTest) -> None:
        key, trace = new_key(), new_trace()
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
    async def test_a_result_is_returned_byte_for_byte(self, store: StoreUnderTest, result: StoredResult | None) -> None:
        key = new_key()

        assert await complete(store, await take(store, key), result)

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Completed)
        dropped = result is not None and len(result.body) > store.largest_result
        assert (verdict.result, verdict.result_dropped) == (None if dropped else result, dropped)

    @pytest.mark.parametrize("length", [timedelta(days=36_500), timedelta.max - TTL, timedelta.max], ids=str)
    async def test_an_outcome_can_have_the_longest_ttl(self, store: StoreUnderTest, length: timedelta) -> None:
        requests = [replace(wish(new_key()), retention=length) for _ in range(2)]
        done, failed = await store.repository.reserve(requests)
        assert isinstance(done, Reserved)
        assert isinstance(failed, Reserved)

        assert await store.repository.complete([Completion(reservation=done, ttl=length)]) == [True]
        assert await store.repository.fail([Failure(reservation=failed, ttl=length, error="no")]) == [True]

        await store.advance(timedelta(days=10_000))
        records = await store.repository.get([done.key, failed.key])
        assert [record.status for record in records if record is not None] == [
            IdempotencyStatus.COMPLETED,
            IdempotencyStatus.FAILED,
        ]

    async def test_a_dropped_result_is_distinguished_from_none(self, store: StoreUnderTest) -> None:
        key = new_key()
        completion = Completion(reservation=await take(store, key), ttl=TTL, result_dropped=True)

        await store.repository.complete([completion])

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Completed)
        assert (verdict.result, verdict.result_dropped) == (None, True)

    async def test_a_repeated_completion_is_true_and_changes_nothing(self, store: StoreUnderTest) -> None:
        key = new_key()
        reserved = await take(store, key)
        await complete(store, reserved)
        before = await store.repository.get([key])

        assert await complete(store, reserved, StoredResult(b"other"))

        after = await store.repository.get([key])
        assert before[0] is not None
        assert after[0] is not None
        assert (after[0].result, after[0].settled_at) == (RESULT, before[0].settled_at)

    async def test_a_repeated_failure_is_true_and_changes_nothing(self, store: StoreUnderTest) -> None:
        key = new_key()
        reserved = await take(store, key)
        await fail(store, reserved, "löst")

        assert await fail(store, reserved, "other")

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, Failed)
        assert (verdict.attempt, verdict.error) == (1, "löst")

    async def test_an_outcome_does_not_replace_another(self, store: StoreUnderTest) -> None:
        completed, failed = await take(store, new_key()), await take(store, new_key())
        await complete(store, completed)
        await fail(store, failed)

        assert not await fail(store, completed)
        assert not await complete(store, failed)

        assert isinstance(await ask(store, wish(completed.key)), Completed)
        assert isinstance(await ask(store, wish(failed.key)), Failed)

    async def test_a_completion_after_the_lease_counts_without_a_takeover(self, store: StoreUnderTest) -> None:
        reserved = await take(store, new_key())
        await lapse(store)

        assert await complete(store, reserved)

        assert isinstance(await ask(store, wish(reserved.key)), Completed)

    async def test_a_completion_of_a_lost_record_is_false(self, store: StoreUnderTest) -> None:
        reserved = await take(store, new_key())
        await store.repository.delete([reserved.key])

        assert not await complete(store, reserved)
        assert not await fail(store, reserved)

        assert await store.repository.get([reserved.key]) == [None]

    @pytest.mark.parametrize("verb", ["complete", "fail", "renew", "release"])
    async def test_another_token_is_another_owner(self, store: StoreUnderTest, verb: str) -> None:
        key = new_key()
        owner = await take(store, key)

        assert not await write(store, verb, replace(owner, token=os.urandom(16)))

        assert isinstance(await ask(store, wish(key)), InProgress)
        assert await complete(store, owner)

    @pytest.mark.parametrize("verb", ["complete", "fail", "renew", "release"])
    async def test_a_zombie_changes_nothing(self, store: StoreUnderTest, verb: str) -> None:
        key = new_key()
        zombie = await take(store, key)
        await lapse(store)
        owner = await take(store, key)

        assert not await write(store, verb, zombie)

        verdict = await ask(store, wish(key))
        assert isinstance(verdict, InProgress)
        assert verdict.attempt == 2
        assert verdict.retry_after > LEASE - SLACK
        assert await complete(store, owner)

    @pytest.mark.parametrize("verb", ["complete", "fail", "renew", "release"])
    @pytest.mark.parametrize("outcome", ["complete", "fail"])
    async def test_a_zombie_does_not_change_the_outcome_of_its_successor(
        self, store: StoreUnderTest, verb: str, outcome: str
    ) -> None:
        key = new_key()
        zombie = await take(store, key)
        await lapse(store)
        owner = await take(store, key)
        await write(store, outcome, owner)
        before = await store.repository.get([key])

        assert not await write(store, verb, zombie)

        (after,) = await store.repository.get([key])
        assert before[0] is not None
        assert after is not None
        assert (after.status, after.fence, after.result) == (before[0].status, owner.fence, before[0].result)
