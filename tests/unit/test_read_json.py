"""The fast and the careful JSON reader agree on every body."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from integr8s_idem.errors import UndecodableEventError
from integr8s_idem.events import MAX_ID_LENGTH, _checked_envelope, _envelope_in, _read_carefully, read_json

ODD_NUMBERS = [
    "0", "-0", "-0.0", "0e9", "1E5", "1e999", "-1e400", "1.7976931348623158e308", "1.7976931348623159e308", "5e-324",
    "1e-999", "NaN", "Infinity", "-Infinity", "01", "1.", ".5", "-", "+1", "1e", "9" * 19, "9" * 310, "9" * 310 + ".0",
    "9" * 4300, "9" * 4301,
]  # fmt: skip
ODD_STRINGS = [
    '"', r'"\ud800"', r'"\ud83d\ude00"', r'"\udc00\ud83d"', r'"\u0000"', r'"\x"', '"\0"', '"\x1f"', '"\x7f"',
    '"\ufeff"', '"\ud800"',
]  # fmt: skip
ODD_TEXTS = ["null", "true", "nul", "[" * 150 + "]" * 150, "[" * 250 + "]" * 250, "[" * 2000, '{"a":' * 2000]

numbers = st.floats().map(repr) | st.integers().map(str) | st.sampled_from(ODD_NUMBERS)
decimals = st.from_regex(r"-?[0-9]{1,25}\.[0-9]{1,25}([eE][+-]?[0-9]{1,3})?", fullmatch=True)
strings = st.text(max_size=4).map(json.dumps) | st.sampled_from(ODD_STRINGS)
names = st.sampled_from(['"a"', '"b"', r'"\u0061"', '""', '"é"', '"e\u0301"', "1", "a"])


def arrays(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner, max_size=4).map(lambda items: f"[{','.join(items)}]")


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.lists(st.tuples(names, inner).map(" : ".join), max_size=4)
    return members.map(lambda items: f"{{{', '.join(items)}}}")


texts = st.recursive(
    numbers | decimals | strings | st.sampled_from(ODD_TEXTS),
    lambda inner: arrays(inner) | objects(inner),
    max_leaves=8,
)


def outcome_of(read: Callable[[Any], object], body: object) -> object:
    """Return the exact result of `read`, or reason and detail of its error."""
    try:
        return repr(read(body))
    except UndecodableEventError as error:
        return error.reason, error.detail


@settings(max_examples=300)
@given(st.sampled_from(["", " ", "\n", "\ufeff", "\x0b"]), texts, st.sampled_from(["", " ", ",", "\0", " 1"]))
def test_both_readers_agree_on_every_text(before: str, text: str, after: str) -> None:
    body = (before + text + after).encode("utf-8", "surrogatepass")

    assert outcome_of(read_json, body) == outcome_of(_read_carefully, body)


@pytest.mark.parametrize("text", [*ODD_NUMBERS, *ODD_STRINGS, *ODD_TEXTS], ids=lambda text: ascii(text)[:30])
@pytest.mark.parametrize("around", ["%s", '[{"a": 0.5, "b": [1, %s]}]'])
def test_both_readers_agree_on_ambiguous_json(around: str, text: str) -> None:
    body = (around % text).encode("utf-8", "surrogatepass")

    assert outcome_of(read_json, body) == outcome_of(_read_carefully, body)


@given(st.binary(max_size=40))
def test_both_readers_agree_on_any_bytes(body: bytes) -> None:
    assert outcome_of(read_json, body) == outcome_of(_read_carefully, body)


def test_ordinary_events_do_not_need_the_careful_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.events._read_carefully", None)
    value = {"id": 2**70, "amount": -0.5, "lines": [{"sku": "é😀", "more": None}, [True, 1e308]]}

    assert read_json(json.dumps(value).encode()) == value


any_text = st.text(st.characters(exclude_categories=()))
ids = st.sampled_from(["x" * length for length in (1, MAX_ID_LENGTH, MAX_ID_LENGTH + 1)] + ["é" * MAX_ID_LENGTH])
envelopes = st.fixed_dictionaries(
    {},
    optional={
        "event_type": any_text | st.none() | st.integers(),
        "event_id": any_text | ids | st.none() | st.integers(),
        "event_version": any_text | st.none() | st.floats(),
    },
)


@settings(max_examples=300)
@example({"event_type": "a", "event_id": "\ud800"})
@given(envelopes | st.none() | st.integers() | st.lists(any_text) | any_text)
def test_type_and_version_are_read_as_pydantic_reads_them(fields: object) -> None:
    def checked(fields: object) -> tuple[str, str]:
        envelope = _checked_envelope(fields)
        return envelope.event_type, envelope.event_version

    assert outcome_of(_envelope_in, fields) == outcome_of(checked, fields)


def test_type_and_version_of_a_valid_event_are_read_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.events._checked_envelope", None)

    assert _envelope_in({"event_type": "a", "event_id": "1"}) == ("a", "1.0")
    assert _envelope_in({"event_type": "a", "event_id": "1", "event_version": "2.1"}) == ("a", "2.1")
