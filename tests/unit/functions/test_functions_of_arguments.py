"""Which arguments a function of the arguments of a call receives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from integr8s_idem.errors import InvalidKeyError
from integr8s_idem.functions.argument_keys import key_maker
from integr8s_idem.functions.arguments import Arguments


def refund(amount: int, order: str) -> None: ...


def refund_by_default(amount: int = 5, order: str = "9") -> None: ...


def refund_by_position(amount: int, order: str, /) -> None: ...


def refund_all(amount: int, *orders: str) -> None: ...


def refund_with(order: str, **options: object) -> None: ...


def _received(make: Callable[..., Any], function: Callable[..., object], *args: object, **kwargs: object) -> Any:
    signature = inspect.signature(function)
    return key_maker(make, signature, function.__name__)(Arguments(signature, args, kwargs))


@pytest.mark.parametrize(
    ("make", "function", "received"),
    [
        (lambda order, limit=10: (order, limit), refund, ("7", 10)),
        (lambda order, *, limit=10: (order, limit), refund, ("7", 10)),
        (lambda limit=10, order="": (order, limit), refund, ("7", 10)),
        (lambda order, limit=10, /: (order, limit), refund, ("7", 10)),
        (lambda order, limit=10, *_: (order, limit), refund, ("7", 10)),
        (lambda order, limit=10, **_: (order, limit), refund, ("7", 10)),
        (lambda order, amount=99: (order, amount), refund, ("7", 30)),
        (lambda order, /: order, refund, "7"),
        (lambda order, /, amount: (order, amount), refund_by_position, ("7", 30)),
        (lambda order, *others: (order, others), refund, ("7", (30,))),
        (lambda orders, limit=10: (orders, limit), refund_all, (("7",), 10)),
        (lambda amount, limit=10, *orders: (amount, limit, orders), refund_all, (30, 10, ("7",))),
    ],
)
def test_parameters_receive_what_they_name_and_keep_other_defaults(
    make: Callable[..., Any], function: Callable[..., object], received: object
) -> None:
    assert _received(make, function, 30, "7") == received


def test_arguments_by_keyword_and_defaults_are_received_too() -> None:
    def make(order: str, limit: int = 10, *, amount: int) -> object:
        return (order, limit, amount)

    assert _received(make, refund, order="7", amount=30) == ("7", 10, 30)
    assert _received(make, refund_by_default) == ("9", 10, 5)


def test_arguments_in_kwargs_of_the_function_are_received_by_name() -> None:
    assert _received(lambda order, currency="EUR": f"{order} {currency}", refund_with, "7") == "7 EUR"
    assert _received(lambda order, currency="EUR": f"{order} {currency}", refund_with, "7", currency="USD") == "7 USD"
    assert _received(lambda order, **given: given, refund_with, "7", currency="USD") == {"currency": "USD"}
    assert _received(lambda options: options, refund_with, "7", currency="USD") == {"currency": "USD"}


@pytest.mark.parametrize(
    ("make", "received"),
    [
        (lambda first, second: (first, second), (30, "7")),
        (lambda _, order: order, "7"),
        (lambda *args, **kwargs: (args, kwargs), ((30, "7"), {})),
        (lambda first, second, limit=10: (first, second, limit), (30, "7", 10)),
    ],
)
def test_a_function_with_other_names_receives_all_arguments_as_passed(
    make: Callable[..., Any], received: object
) -> None:
    assert _received(make, refund, 30, "7") == received


@pytest.mark.parametrize("make", [lambda first, limit=10: first, lambda first, limit=10, /: first])
def test_an_argument_does_not_replace_a_default_of_a_function_with_other_names(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="too many positional arguments"):
        _received(make, refund, 30, "7")


def test_a_function_whose_names_are_in_another_place_is_refused() -> None:
    with pytest.raises(InvalidKeyError, match=r"takes key, which is not .* and amount in another place"):
        _received(lambda key, amount: key, refund, 30, "7")


@pytest.mark.parametrize("make", [lambda: "refund", lambda o=None: "refund"])
def test_a_key_function_that_takes_none_of_the_arguments_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(InvalidKeyError, match="all calls of refund would have the same key"):
        _received(make, refund, 30, "7")
