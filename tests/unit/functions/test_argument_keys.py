"""Keys and fingerprints from the arguments of a call."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.functions.argument_keys import FingerprintSource, KeySource, fingerprint_maker, key_maker
from integr8s_idem.functions.arguments import Arguments
from integr8s_idem.records import is_other_payload


class Color(enum.Enum):
    RED = "red"


@dataclass
class Order:
    id: int
    customer: dict[str, object]


def place(order: Order, amount: object = 1, /, *more: object, note: str = "", **rest: object) -> None: ...


def _called(function: Callable[..., object], *args: object, **kwargs: object) -> Arguments:
    return Arguments(inspect.signature(function), args, kwargs)


def _key(source: KeySource, function: Callable[..., object], *args: object, **kwargs: object) -> str:
    return key_maker(source, inspect.signature(function), "place")(_called(function, *args, **kwargs))


def _fingerprint(source: FingerprintSource, function: Callable[..., object], *args: object, **kwargs: object) -> Any:
    return fingerprint_maker(source, inspect.signature(function), "place")(_called(function, *args, **kwargs))


ORDER = Order(7, {"name": "Ada", "id": 3})


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("order:{order.id}", "order:7"),
        ("order:{order.customer.name}", "order:Ada"),
        ("{amount}", "30"),
        ("{{{amount}}}", "{30}"),
        (["order.id", "amount"], "order.id=7,amount=30"),
        (lambda order, amount, **_: f"{order.id}/{amount}", "7/30"),
    ],
)
def test_a_key_comes_from_a_template_fields_or_a_function(source: KeySource, key: str) -> None:
    assert _key(source, place, ORDER, 30, note="x") == key


def test_positional_and_keyword_arguments_make_the_same_key() -> None:
    def pay(order_id: str, amount: int = 30) -> None: ...

    calls = [
        _called(pay, "7"),
        _called(pay, order_id="7"),
        _called(pay, "7", 30),
        _called(pay, amount=30, order_id="7"),
    ]
    make = key_maker("{order_id}:{amount}", inspect.signature(pay), "pay")
    assert {make(call) for call in calls} == {"7:30"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (Decimal("30.00"), "30.00"),
        (date(2026, 11, 21), "2026-11-21"),
        (Color.RED, "red"),
        ("a b", "a%20b"),
        ("é", "%C3%A9"),
    ],
)
def test_values_with_a_stable_text_are_accepted_in_keys(value: object, text: str) -> None:
    assert _key("{amount}", place, ORDER, value) == text


@pytest.mark.parametrize("value", [None, True, 1.5, object(), b"x", ["a"], {"a": 1}, ORDER])
def test_values_without_a_stable_text_are_rejected_in_keys(value: object) -> None:
    with pytest.raises(InvalidKeyError, match="the key uses amount"):
        _key("{amount}", place, ORDER, value)


def test_an_empty_value_is_rejected_in_a_key() -> None:
    with pytest.raises(InvalidKeyError, match="the key uses note, which is empty"):
        _key("{note}", place, ORDER)


@pytest.mark.parametrize("source", ["{order.nothing}", "{order.customer.nothing}", ["order.nothing.more"]])
def test_a_missing_field_is_rejected_in_a_key(source: KeySource) -> None:
    with pytest.raises(InvalidKeyError, match="nothing was not found"):
        _key(source, place, ORDER)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{ordr.id}", r"the key uses 'ordr.id', and the parameters of place are order, amount, more, note"),
        (["ordr"], "the parameters of place are"),
        ("refund", "contains no parameter"),
        ("", "contains no parameter"),
        ([], "the list of fields is empty"),
        ("{}", "the parameters of place are"),
        ("{order[0]}", "the parameters of place are"),
        ("{order.}", "the parameters of place are"),
        ("{order!r}", "use names only"),
        ("{amount:>9}", "use names only"),
        ("{amount", "cannot be read"),
        ("{amount}{note}", "without a separator"),
        ("{amount}and{note}", "without a separator"),
    ],
)
def test_invalid_key_sources_are_rejected_at_decoration(source: KeySource, why: str) -> None:
    with pytest.raises(InvalidKeyError, match=why):
        key_maker(source, inspect.signature(place), "place")


PARTS = st.text(alphabet="ab1:-_.,=%{} é/", min_size=1, max_size=4)


@given(
    template=st.sampled_from(["{a}:{b}", "{a}-{b}", "x{a}.-{b}y", "{a}and-{b}", ["a", "b"]]),
    one=st.tuples(PARTS, PARTS),
    other=st.tuples(PARTS, PARTS),
)
def test_different_calls_have_different_keys(template: KeySource, one: tuple[str, str], other: tuple[str, str]) -> None:
    def work(a: str, b: str) -> None: ...

    assert (_key(template, work, *one) == _key(template, work, *other)) == (one == other)


def test_different_payloads_have_different_fingerprints() -> None:
    first = _fingerprint(["amount", "order.customer"], place, ORDER, 30)
    assert len(first) == 16
    assert first == _fingerprint(["amount", "order.customer"], place, Order(8, {"id": 3, "name": "Ada"}), 30, note="x")
    assert first != _fingerprint(["amount", "order.customer"], place, ORDER, 31)
    assert _fingerprint(lambda order, *_: order, place, ORDER) == _fingerprint(lambda order, *_: order, place, ORDER, 5)


@dataclass
class LaterOrder(Order):
    coupon: str = ""


def pay(order: Order, note: str = "") -> None: ...


def pay_later(order: LaterOrder, note: str = "") -> None: ...


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (["order"], ["order", "note"]),
        (["note", "order.id"], ["note", "order.id", "order.customer"]),
        (["order"], ["order"]),
        (lambda order: order, lambda order: order),
    ],
    ids=["parameter", "dotted field", "field of the annotation", "field of a returned class"],
)
def test_fingerprints_of_other_fields_are_not_compared(earlier: FingerprintSource, later: FingerprintSource) -> None:
    def of(source: FingerprintSource, function: Callable[..., object], order: Order) -> Any:
        signature = inspect.signature(function)
        return fingerprint_maker(source, signature, "pay", function)(_called(function, order))

    stored = of(earlier, pay, ORDER)

    assert not is_other_payload(stored, of(later, pay_later, LaterOrder(7, ORDER.customer)))
    assert is_other_payload(stored, of(earlier, pay, Order(8, {})))


def test_a_value_that_a_function_returns_is_compared_whole() -> None:
    stored = _fingerprint(lambda order: order.customer, place, ORDER)

    assert is_other_payload(stored, _fingerprint(lambda order: {**order.customer, "note": ""}, place, ORDER))


def test_annotations_that_cannot_be_resolved_have_no_fields() -> None:
    def refund(order: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    make = fingerprint_maker(["order.id"], inspect.signature(refund), "refund", refund)

    assert is_other_payload(make(_called(refund, ORDER)), make(_called(refund, Order(8, {}))))


def test_without_a_source_there_is_no_fingerprint() -> None:
    assert fingerprint_maker(None, inspect.signature(place), "place")(_called(place, ORDER)) is None


def test_values_that_cannot_be_serialized_are_rejected_in_fingerprints() -> None:
    with pytest.raises(InvalidKeyError, match="the fingerprint cannot be made"):
        _fingerprint(["amount"], place, ORDER, object())
