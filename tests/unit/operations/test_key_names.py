"""Full keys taken apart, and the words that people have for them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.operations.keys.kafka_message import MessagePlace, place_of
from integr8s_idem.operations.keys.key_parser import is_meant, named, parts_of, space_of

SPACE = KeySpace("idempotency", "billing")
WORDS = st.text(min_size=1, max_size=20)


def of_event(value: str, generation: int = 0) -> str:
    return SPACE.full(Key.of_event("charge", "order_placed", "id", value).in_generation(generation))


def test_a_key_of_an_event_says_whose_and_what_it_is() -> None:
    told = named(of_event("0192:a", 3), "idempotency")

    assert (told.scope, told.handler, told.event_type, told.how) == ("billing", "charge", "order_placed", "id")
    assert (told.value, told.generation, told.step) == ("0192:a", 3, None)
    assert told.label == "order_placed:0192:a (generation 3)"
    assert told.unit == of_event("0192:a")


def test_a_callers_key_has_neither_handler_nor_type() -> None:
    told = named(SPACE.full(Key.of("order:1")), "idempotency")

    assert (told.scope, told.handler, told.event_type, told.value) == ("billing", "", "", "order:1")
    assert told.label == "order:1"


def test_the_record_of_a_step_names_its_unit() -> None:
    unit = of_event("0192", 1)
    told = named(SPACE.full(SPACE.step(unit, "ship", 2)), "idempotency")

    assert (told.value, told.generation, told.step) == ("0192", 1, 2)
    assert told.unit == of_event("0192")


def test_a_hashed_key_keeps_its_generation() -> None:
    hashed = KeySpace("idempotency", "billing", hash_keys=True)
    key = Key.of("order:1")
    told = named(hashed.full(key.in_generation(7)), "idempotency")

    assert (told.digest, told.generation, told.value) == (key.digest, 7, "")
    assert told.label == f"{key.digest} (generation 7)"


def test_a_scope_that_is_a_hash_stays_one() -> None:
    told = named(KeySpace("idempotency", "x" * 200).full(Key.of("order:1")), "idempotency")

    assert told.scope.startswith("#")
    assert space_of(told, "idempotency", hash_keys=False) is None


@pytest.mark.parametrize("full", ["other:billing::order:1", "idempotency:billing", "idempotency:billing:a:b", "x", ""])
def test_what_is_no_key_of_ours_has_its_text_alone(full: str) -> None:
    told = named(full, "idempotency")

    assert (told.scope, told.handler, told.value) == ("", "", full)


@example(scope="0", handler="0", event_type="0", value="#", generation=0)
@given(scope=WORDS, handler=WORDS, event_type=WORDS, value=WORDS, generation=st.integers(0, 999))
def test_whatever_makes_a_key_is_read_from_it(
    scope: str, handler: str, event_type: str, value: str, generation: int
) -> None:
    space = KeySpace("idempotency", scope)
    key = Key.of_event(handler, event_type, "id", value).in_generation(generation)
    told = named(space.full(key), "idempotency")

    assert told.generation == generation
    if told.scope.startswith("#") or told.digest:
        return  # too long to be read
    assert (told.scope, told.handler, told.event_type, told.value) == (scope, handler, event_type, value)
    assert is_meant(told, value)
    assert is_meant(told, f"{event_type}:{value}")
    assert all(part in told.full for part in parts_of(f"{event_type}:{value}"))


@pytest.mark.parametrize(
    "words",
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
def test_words_that_mean_a_key(words: str) -> None:
    told = named(of_event("0192:a", 3), "idempotency")

    assert is_meant(told, words)
    assert all(part in told.full for part in parts_of(words))


@pytest.mark.parametrize("words", ["192:a", "0192:", "order_paid:0192:a", "charge", "0192:a;2", "placed:0192:a"])
def test_words_that_do_not(words: str) -> None:
    assert not is_meant(named(of_event("0192:a", 3), "idempotency"), words)


def test_a_place_of_kafka_has_three_parts() -> None:
    assert place_of("shop.order_placed:3:12345") == MessagePlace("shop.order_placed", 3, 12345)
    assert str(MessagePlace("orders", 0, 7)) == "orders[0]@7"
    assert [place_of(text) for text in ("orders:3", "orders:3:x", "orders:-1:3", "a b:1:1", ":1:1")] == [None] * 5
