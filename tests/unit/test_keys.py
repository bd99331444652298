"""Keys, fingerprints and canonical JSON."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.events import BaseEvent, EventMetadata
from integr8s_idem.keys import LONGEST_LABEL, MAX_KEY_LENGTH, EntryPoint, Key, KeySpace, downstream_key, escaped
from integr8s_idem.keys.event_keys import KeyedWork, KeyResolver, KeyStrategy, _key_maker
from integr8s_idem.keys.fingerprints import (
    _rfc8785_json,
    canonical_json,
    content_hash,
    event_field_set,
    fingerprint_of,
    fingerprint_of_fields,
    payload_of,
)
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import Job, guarded

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
SPACE = KeySpace("idempotency", "billing")
NASTY = [
    "a",
    ":",
    "::",
    "{a}",
    "{}",
    "*",
    "?",
    "[a]",
    "#",
    "%",
    "%3A",
    "\0",
    "\n",
    "\x7f",
    "é",
    "e\u0301",
    "😀",
    "\ud800",
]
# st.text() leaves lone surrogates out unless it is asked for them.
text = st.text(st.characters(exclude_categories=()), min_size=1, max_size=40) | st.sampled_from(NASTY)
components = st.tuples(text, text, text, text)


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"
    amount: Decimal | None = None
    at: datetime | None = None
    extra: Any = None


class OrderMoved(BaseEvent):
    event_type: Literal["order_moved"] = "order_moved"
    order_id: str = "1"


@pytest.mark.scenario(86)
@given(components, components)
@example((":", "a", "a", "a"), ("a", ":", "a", "a"))
@example(("a:b", "c", "d", "e"), ("a", "b:c", "d", "e"))
def test_different_components_result_in_different_keys(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    first, second = Key.of_event(*one), Key.of_event(*other)

    assert (first.text == second.text) == (one == other)
    assert (SPACE.full(first) == SPACE.full(second)) == (one == other)


@pytest.mark.scenario(86)
@given(components, text)
def test_a_callers_key_never_equals_the_key_of_an_event(event: tuple[str, ...], given_text: str) -> None:
    assert Key.of(given_text).text != Key.of_event(*event).text
    assert Key.of(":".join(event)).text != Key.of_event(*event).text


@pytest.mark.scenario(86)
@given(text, text)
def test_different_strings_result_in_different_keys(one: str, other: str) -> None:
    assert (SPACE.full(Key.of(one)) == SPACE.full(Key.of(other))) == (one == other)


@pytest.mark.scenario(86)
@given(text, text, text)
def test_two_scopes_never_share_a_key(one: str, other: str, key: str) -> None:
    first, second = KeySpace("idempotency", one), KeySpace("idempotency", other)

    assert (first.full(Key.of(key)) == second.full(Key.of(key))) == (one == other)
    assert second.full(Key.of(key)).startswith(first.root) == (one == other)


@pytest.mark.scenario(86)
@given(scope=text | st.text(min_size=100, max_size=600), key=text, hashed=st.booleans())
def test_every_full_key_is_printable_ascii_of_at_most_255_bytes(scope: str, key: str, *, hashed: bool) -> None:
    full = KeySpace("p" * 64, scope, hashed).full(Key.of(key))

    assert full.isascii()
    assert full.isprintable()
    assert " " not in full
    assert not set("{}*?[]") & set(full)
    assert len(full) <= MAX_KEY_LENGTH


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("length", [1, *range(225, 240)])
def test_the_generation_is_a_readable_suffix_even_of_a_hashed_key(length: int, hashed: bool) -> None:
    space, first = KeySpace("idempotency", "billing", hashed), Key.of("k" * length)

    fulls = [space.full(first.in_generation(generation)) for generation in (0, 1, 999)]

    assert fulls[1:] == [f"{fulls[0]};1", f"{fulls[0]};999"]
    assert ";" not in fulls[0]
    assert len(fulls[2]) <= MAX_KEY_LENGTH


@pytest.mark.scenario(86)
@pytest.mark.parametrize("filling", ["a", "😀", ":", "\0", "\ud800"])
def test_a_key_of_one_megabyte_is_hashed_and_stays_distinct(filling: str) -> None:
    huge = filling * 1_000_000

    one, other = SPACE.full(Key.of(huge)), SPACE.full(Key.of(huge + "x"))

    assert one != other
    assert one.startswith("idempotency:billing:#")
    assert len(one) <= MAX_KEY_LENGTH


def test_no_readable_key_looks_like_a_hashed_one() -> None:
    hashed = KeySpace("idempotency", "billing", hash_keys=True).full(Key.of("order:1"))
    imitation = hashed.removeprefix(SPACE.root)

    assert SPACE.full(Key.of(imitation)) != hashed
    assert SPACE.full(Key.of_event(imitation, "a", "b", "c")) != hashed
    assert "order" not in hashed


@pytest.mark.scenario(87)
def test_composed_and_decomposed_characters_result_in_different_keys() -> None:
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))

    assert composed != decomposed
    assert Key.of(composed).text != Key.of(decomposed).text


@pytest.mark.scenario(87)
@pytest.mark.parametrize("other", ["Order", "order ", " order", "order\u200b", "order\0", "\uff4frder", "0rder"])
def test_case_spaces_and_lookalike_characters_result_in_different_keys(other: str) -> None:
    by_id = KeyResolver().resolve("charge", OrderPlaced(event_id=other)).key

    assert Key.of(other).text != Key.of("order").text
    assert by_id.text != KeyResolver().resolve("charge", OrderPlaced(event_id="order")).key.text


@pytest.mark.scenario(86)
def test_two_lone_surrogates_differ_from_the_character_they_encode() -> None:
    assert Key.of("\ud83d\ude00").text != Key.of("😀").text


def test_readable_keys_stay_readable() -> None:
    event = OrderPlaced(event_id="0192-a")

    keyed = KeyResolver().resolve("charge", event)

    assert SPACE.full(keyed.key) == "idempotency:billing:charge:order_placed:id:0192-a"
    assert keyed.key.label == "order_placed:0192-a"
    assert SPACE.full(Key.of("order:1")) == "idempotency:billing::order:1"


ids = text | st.uuids().map(str) | st.text("aZ09-._~@+,/", min_size=LONGEST_LABEL - 20, max_size=LONGEST_LABEL + 5)


@given(handler=text, event_id=ids, order_id=text, generation=st.integers(0, 999))
@example(handler="ship", event_id="0192-a", order_id="1", generation=7)
@example(handler="ship", event_id="x" * (LONGEST_LABEL - len("order_moved:")), order_id="1", generation=0)
@example(handler="ship", event_id="x" * (LONGEST_LABEL - len("order_moved:") + 1), order_id="1", generation=0)
def test_the_prepared_key_of_a_plain_event_is_its_usual_key(
    handler: str, event_id: str, order_id: str, generation: int
) -> None:
    event = OrderMoved.model_construct(**(OrderMoved().__dict__ | {"event_id": event_id, "order_id": order_id}))
    usual = Key.of_event(handler, "order_moved", "id", event_id, generation=generation)
    maker = _key_maker(None, handler, OrderMoved, "order_moved")
    assert maker is not None

    prepared = maker.make(event, generation)

    if prepared is not None:
        digest = canonical_json(payload_of(event))
        assert prepared == KeyedWork(usual, fingerprint_of_fields(event_field_set(OrderMoved), digest))
    is_plain = usual.name == f"order_moved:{event_id}" and escaped(event_id) == event_id and order_id.isprintable()
    assert prepared is not None or not is_plain


@pytest.mark.scenario(6, 100)
def test_handler_type_and_strategy_are_part_of_the_key() -> None:
    event = OrderPlaced(event_id="1")
    by_id = KeyResolver()
    by_function = KeyResolver(KeyStrategy.CUSTOM, custom=lambda e: e.event_id)
    by_content = KeyResolver(KeyStrategy.CONTENT_HASH, frozenset({"order_id"}))

    keys = {
        resolver.resolve(handler, each).key.text
        for resolver in (by_id, by_function, by_content)
        for handler in ("charge", "ship")
        for each in (event, OrderMoved(event_id="1"))
    }

    assert len(keys) == 12


@pytest.mark.scenario(100)
@virtual_time
async def test_work_done_under_another_prefix_runs_again() -> None:
    before, job = guarded(key_prefix="before"), Job()
    after = guarded(before.store, key_prefix="after")
    await before.manager.run("order:1", job)

    assert await after.manager.get("order:1") is None
    await after.manager.run("order:1", job)

    assert job.runs == 2
    assert (await after.record()).attempt == 1


def test_content_excludes_id_timestamp_and_metadata() -> None:
    first = OrderPlaced(order_id="1")
    again = OrderPlaced(order_id="1", metadata=EventMetadata(user_id="bob"), timestamp=datetime(2020, 1, 1, tzinfo=UTC))

    assert first.event_id != again.event_id
    assert content_hash(first) == content_hash(again)
    assert content_hash(first) != content_hash(OrderPlaced(order_id="2"))
    assert fingerprint_of(first) == fingerprint_of(again)


@pytest.mark.scenario(88)
@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"amount": Decimal("30")}, {"amount": "30"}, True),
        ({"amount": Decimal("30")}, {"amount": Decimal("30.0")}, False),
        ({"amount": None}, {}, True),
        ({"at": NOON}, {"at": "2030-01-01T12:00:00Z"}, True),
        ({"at": NOON}, {"at": NOON.astimezone(timezone(timedelta(hours=1)))}, False),
        ({"extra": {"a": 1, "b": 2}}, {"extra": {"b": 2, "a": 1}}, True),
        ({"extra": {"a": None}}, {"extra": {}}, False),
        ({"extra": [1, 2]}, {"extra": [2, 1]}, False),
        ({"extra": 1}, {"extra": True}, False),
        ({"extra": 2**63}, {"extra": f"#{2**63}"}, False),
        ({"extra": 2**63}, {"extra": 2**63 + 1}, False),
    ],
)  # fmt: skip
def test_equality_of_content(one: dict[str, object], other: dict[str, object], *, same: bool) -> None:
    first, second = OrderPlaced.model_validate(one), OrderPlaced.model_validate(other)

    assert (content_hash(first) == content_hash(second)) is same


@pytest.mark.scenario(88)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, b"1"),
        (1.0, b"1"),
        ("1", b'"1"'),
        (True, b"true"),
        (None, b"null"),
        (0, b"0"),
        (-0.0, b"0"),
        (1e21, b"1e+21"),
        (0.1, b"0.1"),
        (1e-7, b"1e-7"),
        (333333333.33333329, b"333333333.3333333"),
        ("é\n\"\\\x01", b'"\xc3\xa9\\n\\"\\\\\\u0001"'),
        ([], b"[]"),
        ({}, b"{}"),
        ({"b": 1, "a": {"d": [], "c": None}}, b'{"a":{"c":null,"d":[]},"b":1}'),
        # RFC 8785 sorts by UTF-16 code units: the emoji comes before U+FB33.
        ({"\ufb33": 1, "😀": 2}, '{"😀":2,"\ufb33":1}'.encode()),
        (2**53 - 1, b"9007199254740991"),
        (2**53, b'big:"#9007199254740992"'),
        (-(2**63), b'big:"#-9223372036854775808"'),
        ({"n": 2**64, "t": "#1"}, b'big:{"n":"#18446744073709551616","t":"##1"}'),
    ],
)  # fmt: skip
def test_canonical_json(value: object, expected: bytes) -> None:
    assert canonical_json(value) == expected


imitations = st.sampled_from(["#1", "##1", f"#{2**60}"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | imitations,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.scenario(88)
@given(json_values, json_values)
@example(2**60, f"#{2**60}")
@example([2**60, "#1"], [2**60, "##1"])
def test_canonical_json_is_equal_exactly_for_equal_values(one: Any, other: Any) -> None:
    def exact(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{name!r}:{exact(value[name])}" for name in sorted(value)) + "}"
        return "[" + ",".join(map(exact, value)) + "]" if isinstance(value, list) else repr(value)

    assert (canonical_json(one) == canonical_json(other)) == (exact(one) == exact(other))


class Word(str):
    """A subclass of str."""


scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**55), 2**55) | st.floats() | st.text(max_size=5)
    | st.floats(-1e17, 1e17) | st.floats(-1e-3, 1e-3) | st.decimals(-(10**9), 10**9, places=2).map(float)
    | st.text(st.characters(exclude_categories=()), max_size=5) | st.binary(max_size=2) | st.just(Word("a"))
)  # fmt: skip
any_names = st.text(max_size=3) | st.text("aé\ufb33😀", max_size=2) | st.integers() | st.just(Word("b"))
anything = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(any_names, inner), max_leaves=12
)  # fmt: skip


def form(write: Any, value: object) -> object:
    try:
        return write(value)
    except InvalidKeyError as error:
        return str(error)


@settings(max_examples=300)
@given(anything)
@example({"\ufb33": 1, "😀": 2})
def test_the_canonical_form_is_identical_to_rfc_8785(value: object) -> None:
    assert form(canonical_json, value) == form(_rfc8785_json, value)


@pytest.mark.parametrize(
    "number",
    [
        5e-324, 1.5e-7, 9.9e-7, 1e-6, 1.5e-6, 1e-5, 1.5e-5, 9.9e-5, 1e-4, 1.5e-4, -0.0, 1e15, 1e15 - 0.5, 1e15 + 0.5,
        2.0**53 - 1, 2.0**53, 2.0**53 + 2, 1e16, 1e17, 1e20, 1.5e21, 1e22, 1e23, 1.7976931348623157e308,
    ],
)  # fmt: skip
def test_a_number_near_the_limit_of_plain_notation_is_written_as_in_rfc_8785(number: float) -> None:
    assert canonical_json([number, -number]) == _rfc8785_json([number, -number])


def test_every_character_is_written_as_in_rfc_8785() -> None:
    characters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))

    assert canonical_json([characters, {'\0\x1f\x7f"\\/': 1}]) == _rfc8785_json([characters, {'\0\x1f\x7f"\\/': 1}])


def test_ordinary_payloads_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.keys.fingerprints._rfc8785_json", None)

    event = OrderPlaced(amount=Decimal("19.99"), at=NOON, extra=[{"b": 0.5, "a": [1.0, -3, None, True, "é😀\n"]}])

    assert fingerprint_of(event).hex() == "abde3e54cbbf658a60bc5ff1975b3dd3"


@given(text | st.text())
def test_a_component_of_a_key_is_percent_encoded(component: str) -> None:
    assert escaped(component) == quote(component, safe="-._~@+,/", errors="surrogatepass")
    assert type(escaped(Word(component))) is str


@given(st.lists(text | st.text(), min_size=1, max_size=4))
def test_each_part_of_the_key_of_an_entry_point_is_percent_encoded(parts: list[str]) -> None:
    encoded = [quote(part, safe="-._~@+,/", errors="surrogatepass") for part in parts]

    assert Key.of_entry(EntryPoint.HTTP, *parts, name="it").text == ":".join(["", "http", *encoded])


@given(
    text | st.text("aZ09-._~@+,/:", min_size=1) | st.sampled_from(["http:a", "faststream:", "kafka-loop:a:b", "http"])
)
def test_a_callers_key_is_percent_encoded(given_text: str) -> None:
    encoded = quote(given_text, safe="-._~@+,/:", errors="surrogatepass")
    if given_text.startswith(("http:", "faststream:", "kafka-loop:")):
        encoded = encoded.replace(":", "%3A", 1)

    assert Key.of(given_text).text == ":" + encoded


@pytest.mark.parametrize("length", [LONGEST_LABEL, LONGEST_LABEL + 1, 1_000])
def test_the_name_of_a_long_key_is_short(length: int) -> None:
    assert (Key.of("a" * length).name == "a" * length) is (length <= LONGEST_LABEL)
    assert len(Key.of("a" * length).name) <= LONGEST_LABEL


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.scenario(88)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "\ud800", {"\ud800": 1}, object(), {1: 2}, b"a", deep(100_000)],
    ids=["nan", "inf", "surrogate", "surrogate name", "object", "number as name", "bytes", "deep"],
)
@pytest.mark.parametrize("other", [0, 2**60], ids=["", "with a big integer"])
def test_a_value_without_canonical_form_is_rejected(value: object, other: int) -> None:
    with pytest.raises(InvalidKeyError):
        canonical_json([other, value])


@pytest.mark.parametrize(
    ("strategy", "fields", "custom"),
    [
        (KeyStrategy.CUSTOM, None, None),
        (KeyStrategy.EVENT_BASED, None, str),
        (KeyStrategy.EVENT_BASED, frozenset({"order_id"}), None),
    ],
)
def test_a_contradictory_resolver_is_rejected(strategy: Any, fields: Any, custom: Any) -> None:
    with pytest.raises(InvalidKeyError):
        KeyResolver(strategy, fields, custom)


@pytest.mark.scenario(88)
@pytest.mark.parametrize("fields", [frozenset({"order_id", "amuont"}), frozenset[str]()])
def test_missing_fields_are_rejected_once_the_event_class_is_known(fields: frozenset[str]) -> None:
    with pytest.raises(InvalidKeyError, match="OrderPlaced has no field"):
        KeyResolver(KeyStrategy.CONTENT_HASH, fields).check(OrderPlaced)


@pytest.mark.scenario(89)
@pytest.mark.parametrize("value", ["", None, 0, 7, b"x", [], False])
def test_a_key_function_must_return_a_string(value: Any) -> None:
    with pytest.raises(InvalidKeyError):
        KeyResolver(KeyStrategy.CUSTOM, custom=lambda _: value).resolve("charge", OrderPlaced())


@given(text, text, text, text)
@settings(max_examples=200)
def test_downstream_keys_differ_if_key_or_name_differs(key: str, name: str, key2: str, name2: str) -> None:
    one, other = SPACE.full(Key.of(key)), SPACE.full(Key.of(key2))

    assert (downstream_key(one, name) == downstream_key(other, name2)) == ((key, name) == (key2, name2))
    assert len(downstream_key(one, name * 50)) <= MAX_KEY_LENGTH
