"""Parsing of full keys, and matching of keys by name."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.operations.keys.kafka_message import MessagePlace, parse_place
from integr8s_idem.operations.keys.key_parser import key_space, literal_parts, matches_name, parse_key

SPACE = KeySpace("idempotency", "billing")
WORDS = st.text(min_size=1, max_size=20)


def of_event(value: str, generation: int = 0) -> str:
    return SPACE.full(Key.of_event("charge", "order_placed", "id", value).in_generation(generation))


def test_a_key_of_an_event_is_parsed() -> None:
    parsed = parse_key(of_event("0192:a", 3), "idempotency")

    assert (parsed.scope, parsed.handler, parsed.event_type, parsed.source) == (
        "billing",
        "charge",
        "order_placed",
        "id",
    )
    assert (parsed.value, parsed.generation, parsed.step) == ("0192:a", 3, None)
    assert parsed.label == "order_placed:0192:a (generation 3)"
    assert parsed.unit == of_event("0192:a")


def test_a_callers_key_has_neither_handler_nor_event_type() -> None:
    parsed = parse_key(SPACE.full(Key.of("order:1")), "idempotency")

    assert (parsed.scope, parsed.handler, parsed.event_type, parsed.value) == ("billing", "", "", "order:1")
    assert parsed.label == "order:1"


def test_the_record_of_a_step_names_its_unit() -> None:
    unit = of_event("0192", 1)
    parsed = parse_key(SPACE.full(SPACE.step(unit, "ship", 2)), "idempotency")

    assert (parsed.value, parsed.generation, parsed.step) == ("0192", 1, 2)
    assert parsed.unit == of_event("0192")


def test_a_hashed_key_keeps_its_generation() -> None:
    hashed = KeySpace("idempotency", "billing", hash_keys=True)
    key = Key.of("order:1")
    parsed = parse_key(hashed.full(key.in_generation(7)), "idempotency")

    assert (parsed.digest, parsed.generation, parsed.value) == (key.digest, 7, "")
    assert parsed.label == f"{key.digest} (generation 7)"


def test_a_hashed_scope_is_not_reversed() -> None:
    parsed = parse_key(KeySpace("idempotency", "x" * 200).full(Key.of("order:1")), "idempotency")

    assert parsed.scope.startswith("#")
    assert key_space(parsed, "idempotency", hash_keys=False) is None


@pytest.mark.parametrize("full", ["other:billing::order:1", "idempotency:billing", "idempotency:billing:a:b", "x", ""])
def test_an_unknown_format_has_only_a_value(full: str) -> None:
    parsed = parse_key(full, "idempotency")

    assert (parsed.scope, parsed.handler, parsed.value) == ("", "", full)


@example(scope="0", handler="0", event_type="0", value="#", generation=0)
@example(scope="0", handler="0", event_type="0", value=";1", generation=0)
@given(scope=WORDS, handler=WORDS, event_type=WORDS, value=WORDS, generation=st.integers(0, 999))
def test_every_part_of_a_key_is_parsed(scope: str, handler: str, event_type: str, value: str, generation: int) -> None:
    space = KeySpace("idempotency", scope)
    key = Key.of_event(handler, event_type, "id", value).in_generation(generation)
    parsed = parse_key(space.full(key), "idempotency")

    assert parsed.generation == generation
    if parsed.scope.startswith("#") or parsed.digest:
        return  # too long to be read
    assert (parsed.scope, parsed.handler, parsed.event_type, parsed.value) == (scope, handler, event_type, value)
    assert matches_name(parsed, value)
    assert matches_name(parsed, f"{event_type}:{value}")
    assert all(part in parsed.full for part in literal_parts(f"{event_type}:{value}"))


@pytest.mark.parametrize(
    "name",
    [
        "0192:a",
        "order_placed:0192:a",
        "0192%3Aa",
        "order_placed:id:0192%3Aa",
        "billing:charge:order_placed:id:0192%3Aa",
        "idempotency:billing:charge:order_placed:id:0192%3Aa",
        "0192:a;3",
    ],
)
def test_names_that_match_a_key(name: str) -> None:
    parsed = parse_key(of_event("0192:a", 3), "idempotency")

    assert matches_name(parsed, name)
    assert all(part in parsed.full for part in literal_parts(name))


@pytest.mark.parametrize("name", ["192:a", "0192:", "order_paid:0192:a", "charge", "0192:a;2", "placed:0192:a"])
def test_names_that_do_not_match_a_key(name: str) -> None:
    assert not matches_name(parse_key(of_event("0192:a", 3), "idempotency"), name)


def test_a_place_of_kafka_has_three_parts() -> None:
    assert parse_place("shop.order_placed:3:12345") == MessagePlace("shop.order_placed", 3, 12345)
    assert parse_place("shop.order_placed[3]@12345") == MessagePlace("shop.order_placed", 3, 12345), "as in log lines"
    assert str(MessagePlace("orders", 0, 7)) == "orders[0]@7"
    assert [parse_place(text) for text in ("orders:3", "orders:3:x", "orders:-1:3", "a b:1:1", ":1:1")] == [None] * 5
