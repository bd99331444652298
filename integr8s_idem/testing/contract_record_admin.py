"""The contract of stores that implement `RecordAdmin`."""

from __future__ import annotations

from typing import Protocol

import pytest

from integr8s_idem.records import Corrupt, IdempotencyRecord, Reserved
from integr8s_idem.stores import IdempotencyRepository, RecordAdmin
from integr8s_idem.testing.store_under_test import (
    LEASE,
    SLACK,
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


class _AdminStore(IdempotencyRepository, RecordAdmin, Protocol):
    """A store with `RecordAdmin`."""


def _admin(store: StoreUnderTest) -> _AdminStore:
    assert isinstance(store.repository, RecordAdmin)
    return store.repository


async def _seen(store: StoreUnderTest, key: str) -> IdempotencyRecord:
    (record,) = await store.repository.get([key])
    assert record is not None
    return record


async def _surveyed(store: StoreUnderTest, prefix: str, *holding: str) -> list[str]:
    return [found.key async for page in _admin(store).survey(prefix, holding) for found in page.found]


class RecordAdminContract:
    """Inherit from this class in addition to `RepositoryContract`, with the same fixture, for a `RecordAdmin` store."""

    async def test_a_record_contains_the_time_it_was_read(self, store: StoreUnderTest) -> None:
        key = new_key()
        await take(store, key)

        seen = await _seen(store, key)

        assert seen.seen_at is not None
        assert seen.lease_until is not None
        assert LEASE - SLACK <= seen.lease_until - seen.seen_at <= LEASE

    async def test_a_survey_finds_keys_that_contain_the_given_texts(self, store: StoreUnderTest) -> None:
        root = new_key()
        for name in ("a:id:1", "a:id:2", "b:id:1", "A:id:1", "a:id:%1_"):
            await take(store, f"{root}:{name}")

        assert sorted(await _surveyed(store, f"{root}:")) == sorted(
            f"{root}:{name}" for name in ("a:id:1", "a:id:2", "b:id:1", "A:id:1", "a:id:%1_")
        )
        assert sorted(await _surveyed(store, f"{root}:", "a:i", "d:1")) == [f"{root}:a:id:1"]
        assert await _surveyed(store, f"{root}:", "%1_") == [f"{root}:a:id:%1_"]
        assert await _surveyed(store, f"{root}:", "c:id") == []

    async def test_a_survey_visits_all_keys(self, store: StoreUnderTest) -> None:
        root = new_key()
        wanted = {f"{root}:{number}" for number in range(60)}
        await store.repository.reserve([wish(key) for key in sorted(wanted)])

        pages = [page async for page in _admin(store).survey(f"{root}:")]

        assert {found.key for page in pages for found in page.found} == wanted
        assert sum(page.passed for page in pages) >= len(wanted)
        size = await _admin(store).size()
        assert size is None or size >= 0

    async def test_a_survey_includes_unreadable_records(self, store: StoreUnderTest) -> None:
        if store.spoil is None:
            pytest.skip("this store cannot hold an unreadable record")
        key = new_key()
        await store.spoil(key)

        (found,) = [found async for page in _admin(store).survey(key) for found in page.found]

        assert isinstance(found, Corrupt)
        assert found.key == key
        assert found.reason

    async def test_the_lease_of_a_record_that_was_read_is_ended(self, store: StoreUnderTest) -> None:
        key = new_key()
        reserved = await take(store, key)

        assert await _admin(store).end_leases([await _seen(store, key)]) == [True]

        assert (await _seen(store, key)).lease_until is None
        assert not await write(store, "renew", reserved)
        again = await ask(store, wish(key))
        assert isinstance(again, Reserved)
        assert again.attempt == 2
        assert again.fence > reserved.fence

    async def test_the_owner_of_an_ended_lease_is_rejected_after_a_takeover(self, store: StoreUnderTest) -> None:
        first, second = new_key(), new_key()
        early, late = await take(store, first), await take(store, second)
        assert await _admin(store).end_leases([await _seen(store, first), await _seen(store, second)]) == [True, True]
        await take(store, second)

        # No other worker has taken over the first key, so its outcome is recorded.
        assert await complete(store, early)
        assert not await complete(store, late)

    async def test_a_lease_renewed_since_it_was_read_is_not_ended(self, store: StoreUnderTest) -> None:
        key = new_key()
        reserved = await take(store, key)
        seen = await _seen(store, key)
        await store.advance(SLACK)
        assert await write(store, "renew", reserved)

        assert await _admin(store).end_leases([seen]) == [False]

        assert (await _seen(store, key)).lease_until is not None

    async def test_only_the_lease_of_the_record_that_was_read_is_ended(self, store: StoreUnderTest) -> None:
        taken, settled, gone = new_key(), new_key(), new_key()
        old = await take(store, settled)
        await take(store, taken)
        await take(store, gone)
        seen = [await _seen(store, key) for key in (taken, settled, gone)]
        assert await complete(store, old)
        await store.repository.delete([gone])
        await lapse(store)
        await take(store, taken)

        assert await _admin(store).end_leases(seen) == [False, False, False]

        assert (await _seen(store, taken)).lease_until is not None
        assert await _admin(store).end_leases([await _seen(store, settled)]) == [False]

    async def test_records_that_were_read_are_deleted(self, store: StoreUnderTest) -> None:
        keys = [new_key() for _ in range(4)]
        held, released, completed, failed = [await take(store, key) for key in keys]
        await write(store, "release", released)
        await complete(store, completed)
        await fail(store, failed)
        seen = [await _seen(store, key) for key in keys]

        assert await _admin(store).forget(seen) == [True] * len(keys)

        assert await store.repository.get(keys) == [None] * len(keys)
        assert not await complete(store, held)
        assert await _admin(store).forget(seen) == [False] * len(keys)

    async def test_records_changed_since_they_were_read_are_kept(self, store: StoreUnderTest) -> None:
        keys = [new_key() for _ in range(4)]
        settled, renewed, released, again = [await take(store, key) for key in keys]
        await complete(store, again)
        seen = [await _seen(store, key) for key in keys]
        await store.advance(SLACK)
        await complete(store, settled)
        await write(store, "renew", renewed)
        await write(store, "release", released)
        await store.repository.delete([keys[3]])
        await take(store, keys[3])

        assert await _admin(store).forget(seen) == [False] * len(keys)

        assert None not in await store.repository.get(keys)

    async def test_replaced_records_with_the_same_status_are_kept(self, store: StoreUnderTest) -> None:
        keys = [new_key() for _ in range(2)]
        done, released = [await take(store, key) for key in keys]
        await complete(store, done)
        await write(store, "release", released)
        seen = [await _seen(store, key) for key in keys]
        await store.repository.delete([keys[0]])
        await complete(store, await take(store, keys[0]))
        await write(store, "release", await take(store, keys[1]))

        assert await _admin(store).forget(seen) == [False, False]

        assert None not in await store.repository.get(keys)
