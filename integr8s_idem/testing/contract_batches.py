"""The contract of stores: batches, expiry and reading."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest

from integr8s_idem.errors import CorruptRecordError
from integr8s_idem.records import (
    Completed,
    Completion,
    Corrupt,
    IdempotencyStatus,
    InProgress,
    Reserved,
    StoredResult,
)
from integr8s_idem.testing.store_under_test import (
    LEASE,
    RESULT,
    RETENTION,
    SLACK,
    TTL,
    StoreUnderTest,
    ask,
    complete,
    fail,
    lapse,
    new_key,
    take,
    wish,
    write,
)


class BatchesContract:
    """Part of `RepositoryContract`."""

    large_batch = 2_500
    """Number of keys in the largest batch."""

    async def test_answers_have_the_order_of_the_requests(self, store: StoreUnderTest) -> None:
        done, held, fresh = new_key(), new_key(), new_key()
        await complete(store, await take(store, done))
        await take(store, held)

        verdicts = await store.repository.reserve([wish(key) for key in (fresh, done, held, done)])

        assert [type(verdict) for verdict in verdicts] == [Reserved, Completed, InProgress, Completed]
        assert [verdict.key for verdict in verdicts] == [fresh, done, held, done]

    async def test_a_repeated_key_in_a_batch_is_answered_like_two_callers(self, store: StoreUnderTest) -> None:
        key = new_key()

        first, second = await store.repository.reserve([wish(key), wish(key)])

        assert isinstance(first, Reserved)
        assert isinstance(second, InProgress)
        completion = Completion(reservation=first, ttl=TTL, result=RESULT)
        assert await store.repository.complete([completion, completion]) == [True, True]

    async def test_a_large_batch_is_answered_completely(self, store: StoreUnderTest) -> None:
        keys = [new_key() for _ in range(self.large_batch)]

        verdicts = await store.repository.reserve([wish(key) for key in keys])

        reserved = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        assert [verdict.key for verdict in reserved] == keys
        assert all(await store.repository.renew(reserved, LEASE))
        assert all(await store.repository.complete([Completion(reservation=one, ttl=TTL) for one in reserved]))
        assert await store.repository.release(reserved) == [False] * len(keys)
        assert await store.repository.delete(keys) == len(keys)

    async def test_large_results_are_returned_in_one_batch(self, store: StoreUnderTest) -> None:
        size = min(1_048_576, store.largest_result)
        bodies = {new_key(): bytes([number]) * size for number in range(12)}
        completions = [
            Completion(reservation=await take(store, key), ttl=TTL, result=StoredResult(body))
            for key, body in bodies.items()
        ]
        assert all(await store.repository.complete(completions))

        verdicts = await store.repository.reserve([wish(key) for key in bodies])

        assert [v.result.body for v in verdicts if isinstance(v, Completed) and v.result] == list(bodies.values())
        records = await store.repository.get(list(bodies))
        assert [r.result.body for r in records if r is not None and r.result] == list(bodies.values())

    async def test_empty_batches_have_empty_answers(self, store: StoreUnderTest) -> None:
        repository = store.repository

        assert await repository.reserve([]) == []
        assert await repository.complete([]) == await repository.fail([]) == []
        assert await repository.renew([], LEASE) == await repository.release([]) == []
        assert await repository.get([]) == []
        assert await repository.delete([]) == 0

    async def test_an_unsettled_record_expires_after_its_retention(self, store: StoreUnderTest) -> None:
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
    async def test_an_outcome_expires_after_its_ttl(self, store: StoreUnderTest, verb: str) -> None:
        key = new_key()
        await write(store, verb, await take(store, key))

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
        await write(store, verb, await take(store, key))

        (record,) = await store.repository.get([key])

        assert record is not None
        assert record.expires_at is not None
        assert (record.lease_until is None) == (verb == "release")
        await store.advance(RETENTION + SLACK)
        assert await store.repository.get([key]) == [None]

    async def test_a_retention_below_the_lease_does_not_shorten_the_lease(self, store: StoreUnderTest) -> None:
        key = new_key()
        await ask(store, wish(key, retention=timedelta(seconds=1)))

        await store.advance(timedelta(seconds=10))

        assert isinstance(await ask(store, wish(key)), InProgress)

    async def test_a_deleted_key_starts_over(self, store: StoreUnderTest) -> None:
        key = new_key()
        await complete(store, await take(store, key))

        assert await store.repository.delete([key, new_key()]) == 1

        assert (await take(store, key)).attempt == 1

    async def test_a_scan_returns_the_keys_with_the_prefix(self, store: StoreUnderTest) -> None:
        root = f"contract:{uuid.uuid4().hex}:a*b?[c]\\"
        inside = [root, *(f"{root}{end}" for end in (*range(5), "A", "a", "~"))]
        for key in [*inside, root.replace("*", "x") + "1", root.upper() + "1", root[:-1] + "~"]:
            await take(store, key)

        seen = [record.key async for record in store.repository.scan(root)]

        assert sorted(seen) == sorted(inside)

    async def test_only_keys_with_a_lease_are_active(self, store: StoreUnderTest) -> None:
        root = f"contract:{uuid.uuid4().hex}:"
        await take(store, root + "lapsed")
        await lapse(store)
        held = [await take(store, f"{root}{number}") for number in range(5)]
        await take(store, root.upper())
        await complete(store, held[0])
        await fail(store, held[1])
        await store.repository.release([held[2]])

        assert await store.repository.count_active(root) == 2

    async def test_an_unreadable_record_does_not_fail_its_batch(self, store: StoreUnderTest) -> None:
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

    async def test_a_ping_returns_kind_and_latency(self, store: StoreUnderTest) -> None:
        health = await store.repository.ping()

        assert health.kind
        assert health.latency >= timedelta(0)
