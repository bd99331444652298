"""The requests of a batch are those that are made for single works."""

from __future__ import annotations

from copy import copy
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.work import Isolation, Work
from integr8s_idem.keys import Key
from integr8s_idem.records import TraceLink
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import SILENT

TTLS = (None, timedelta(seconds=1), timedelta(days=400), timedelta.max)

works = st.builds(
    Work,
    key=st.builds(Key, st.text(min_size=1).map(":{}".format), st.just("name"), st.sampled_from((0, 1, 999))),
    fingerprint=st.sampled_from((None, b"f" * 16)),
    ttl=st.sampled_from(TTLS),
    token=st.sampled_from((b"", b"k" * 16)),
    isolation=st.sampled_from(Isolation),
    trace=st.sampled_from((None, TraceLink(b"t" * 16, b"s" * 8))),
)


@given(st.lists(works, max_size=4), st.booleans())
def test_requests_of_a_batch_equal_single_requests(batch: list[Work], hash_keys: bool) -> None:
    config = IdempotencyConfig(hash_keys=hash_keys)
    client = StoreClient(config, MemoryIdempotencyRepository(), SILENT, "bïlling", "owner")
    kept = [work.token for work in batch]

    requests = client.requests(batch)

    assert requests == [client.request(copy(work)) for work in batch]
    drawn = [work.token for work, token in zip(batch, kept, strict=True) if not token]
    assert all(len(token) == 16 for token in drawn)
    assert len(set(drawn)) == len(drawn)
    assert all(work.token == token for work, token in zip(batch, kept, strict=True) if token)
