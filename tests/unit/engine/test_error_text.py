"""The text of errors in records, logs and dead letters."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.engine.error_text import LONGEST_ERROR, describe_error
from integr8s_idem.operations.error_patterns import pattern_of


def test_a_group_is_described_with_its_innermost_errors_in_any_order() -> None:
    one, two = ValueError("bad amount"), ConnectionResetError("the bank\nhas gone")
    text = "ExceptionGroup: charges (2 sub-exceptions): ConnectionResetError: the bank has gone; ValueError: bad amount"

    assert describe_error(ExceptionGroup("charges", [one, two])) == text
    assert describe_error(ExceptionGroup("charges", [two, one])) == text
    assert describe_error(ExceptionGroup("charges", [two, ExceptionGroup("inner", [one, two])])) == text


def test_equal_errors_of_a_group_are_named_once() -> None:
    group = ExceptionGroup("g", [ValueError("no")] * 2 + [ValueError("no")])

    assert describe_error(group) == "ExceptionGroup: g (3 sub-exceptions): ValueError: no"


def test_groups_with_different_errors_have_different_patterns() -> None:
    patterns = {pattern_of(describe_error(ExceptionGroup("g", [each("no")]))) for each in (ValueError, KeyError)}

    assert len(patterns) == 2


@pytest.mark.parametrize("filler", ["x", " ", "é"])
def test_the_text_of_a_group_is_limited_and_names_more_than_its_longest_error(filler: str) -> None:
    errors = [ValueError(filler * 5_000), KeyError("2"), *(OSError(f"{each}" * 100) for each in range(500))]

    text = describe_error(ExceptionGroup(filler * 400, errors))

    assert len(text) <= LONGEST_ERROR
    assert "KeyError" in text


def test_no_credential_remains_in_the_text_of_a_group() -> None:
    for length in range(300):
        inner = ValueError(f"{'x' * length} redis://user:hunter2hunter2@h:1/0")
        assert "hunter2" not in describe_error(ExceptionGroup("g", [inner]))
    assert "hunter2" not in describe_error(ExceptionGroup("redis://user:hunter2@h:1/0", [ValueError()]))


def test_the_errors_of_deeply_nested_groups_are_named() -> None:
    group: Exception = ExceptionGroup("g", [ValueError("inner")])
    for _ in range(2_000):
        group = ExceptionGroup("g", [group, group])

    assert describe_error(group) == "ExceptionGroup: g (2 sub-exceptions): ValueError: inner"


class PanicError(BaseException):
    """As an extension module in Rust raises it: it is no `Exception`."""


@pytest.mark.parametrize("fault", [PanicError, SystemExit, asyncio.CancelledError, RuntimeError])
def test_an_error_whose_text_raises_is_described_without_it(fault: type[BaseException]) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise fault

    assert describe_error(UnprintableError()).endswith(f"(its text is not available: {fault.__name__})")


def test_an_interrupt_while_an_error_is_described_is_raised() -> None:
    class InterruptedTextError(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        describe_error(InterruptedTextError())
