"""The contract of stores: fingerprints of payloads."""

from __future__ import annotations

from typing import Final

import pytest

from integr8s_idem.records import Completed, Failed, InProgress, KeyReused, Reserved
from integr8s_idem.testing.store_under_test import STATES, StoreUnderTest, ask, bring_into, new_key, take, wish

OLD_SET: Final = b"\x81old"
NEW_SET: Final = b"\x81new"


class PayloadContract:
    """Part of `RepositoryContract`."""

    @pytest.mark.parametrize("state", STATES)
    async def test_a_known_key_with_another_payload_is_rejected(self, store: StoreUnderTest, state: str) -> None:
        key = new_key()
        await bring_into(store, state, await take(store, key, fingerprint=b"a" * 16))

        verdict = await ask(store, wish(key, fingerprint=b"b" * 16))

        assert verdict == KeyReused(key=key, stored=b"a" * 16, offered=b"b" * 16)
        assert not isinstance(await ask(store, wish(key)), KeyReused)

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize(
        ("stored", "offered"),
        [
            (OLD_SET + b"a" * 12, NEW_SET + b"b" * 12),
            (OLD_SET + b"a" * 12, NEW_SET + b"a" * 12),
            (OLD_SET + b"a" * 12, b"\x01old" + b"b" * 12),
            (b"\x01old" + b"a" * 12, OLD_SET + b"b" * 12),
        ],
        ids=["other", "same digest", "whole after set", "set after whole"],
    )
    async def test_fingerprints_of_different_field_sets_are_not_compared(
        self, store: StoreUnderTest, state: str, stored: bytes, offered: bytes
    ) -> None:
        """Workers with another version of a class of events do not take their redeliveries for a reused key."""
        key = new_key()
        await bring_into(store, state, await take(store, key, fingerprint=stored))

        verdict = await ask(store, wish(key, fingerprint=offered))

        is_free = state in {"lapsed", "released"}
        expected: type = {"processing": InProgress, "completed": Completed, "failed": Failed}.get(state, Reserved)
        assert isinstance(verdict, expected)
        (record,) = await store.repository.get([key])
        # The payload of the attempt that runs, or that had the outcome.
        assert record is not None
        assert record.fingerprint == (offered if is_free else stored)

    @pytest.mark.parametrize("state", STATES)
    async def test_fingerprints_of_the_same_field_set_are_compared(self, store: StoreUnderTest, state: str) -> None:
        key = new_key()
        await bring_into(store, state, await take(store, key, fingerprint=OLD_SET + b"a" * 12))

        verdict = await ask(store, wish(key, fingerprint=OLD_SET + b"b" * 12))

        assert verdict == KeyReused(key=key, stored=OLD_SET + b"a" * 12, offered=OLD_SET + b"b" * 12)

    async def test_a_repeated_request_with_another_field_set_keeps_the_first(self, store: StoreUnderTest) -> None:
        """The same token stands for the same attempt."""
        key, token = new_key(), b"t" * 16
        await ask(store, wish(key, token=token, fingerprint=OLD_SET + b"a" * 12))

        again = await ask(store, wish(key, token=token, fingerprint=NEW_SET + b"b" * 12))

        assert isinstance(again, Reserved)
        assert again.attempt == 1
        (record,) = await store.repository.get([key])
        assert record is not None
        assert record.fingerprint == OLD_SET + b"a" * 12
