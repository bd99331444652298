"""Loops of one's own, without a broker: what names the work of a record, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.integrations.loops import LONGEST_PAUSE, by_header, by_position, pause_after, work_of
from integr8s_idem.keys import fingerprint
from tests.support.fake_consumer import FakeRecord
from tests.support.guarded import guarded


def _fingerprint(value: Any) -> bytes | None:
    return work_of(guarded().manager, FakeRecord("orders", 0, 7, None, value), by_position, None).fingerprint


def test_the_body_is_the_payload_whatever_a_deserializer_has_made_of_it() -> None:
    assert _fingerprint(b"{}") == fingerprint(b"{}")
    assert _fingerprint(None) == _fingerprint(b"")
    assert _fingerprint({"order": 1}) == _fingerprint({"order": 1}) != _fingerprint({"order": 2})
    assert _fingerprint("text") is not None
    assert _fingerprint(object()) is None


def test_a_header_is_found_whatever_its_case_and_an_empty_one_is_none() -> None:
    record = FakeRecord("orders", 1, 7, None, b"", [("Event-Id", b"e-1"), ("empty", b"")])
    assert by_header("event-id")(record) == "e-1"
    for name in ("empty", "missing"):
        with pytest.raises(InvalidKeyError, match=rf"orders\[1\]@7 has no header {name}"):
            by_header(name)(record)


def test_pauses_grow_and_end_growing() -> None:
    pauses = [pause_after(failures) for failures in range(1, 200)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.2, LONGEST_PAUSE)
