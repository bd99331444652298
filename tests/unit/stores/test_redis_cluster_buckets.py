"""Buckets of the Redis Cluster store: which keys share a slot, and how the slots are distributed."""

from __future__ import annotations

from collections import Counter

import pytest

from integr8s_idem.stores.redis.buckets import (
    BUCKET_SLOTS,
    BUCKETS,
    SLOTS,
    TAGS,
    bucket_of,
    key_of,
    slot_of,
    stored_name,
)


def test_each_bucket_has_a_slot_in_its_own_share_of_all_slots() -> None:
    assert [slot * BUCKETS // SLOTS for slot in BUCKET_SLOTS] == list(range(BUCKETS))


@pytest.mark.parametrize("nodes", [3, 7, 16])
def test_nodes_with_equal_shares_of_slots_have_equal_shares_of_buckets(nodes: int) -> None:
    counts = Counter(slot * nodes // SLOTS for slot in BUCKET_SLOTS)

    assert max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.parametrize("key", ["k", "idempotency:a:{x}:{y}", "}{", "", "é"])
def test_a_redis_name_contains_its_key_and_the_tag_of_its_slot(key: str) -> None:
    name = stored_name(key)

    assert key_of(name) == key
    assert slot_of(name[1 : name.index("}")].encode()) == BUCKET_SLOTS[bucket_of(key)]


def test_the_bucket_of_a_key_never_changes() -> None:
    """A different bucket for a key would make its stored record unreachable."""
    assert (BUCKETS, bucket_of("idempotency:billing:order-1"), TAGS[0], TAGS[127]) == (
        128,
        28,
        "{idem:64}",
        "{idem:34}",
    )


def test_keys_are_spread_over_all_buckets() -> None:
    counts = Counter(bucket_of(f"idempotency:billing:{number}") for number in range(12_800))

    assert len(counts) == BUCKETS
    assert max(counts.values()) < 200
