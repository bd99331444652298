"""Patterns of error messages: what varies is replaced, and what remains is the same for every event."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.operations.error_patterns import LONGEST, MOST_READ, pattern_of

WORDS = st.text("abcxyz :,.-_'\"/@[]()<>=\n\t", max_size=60)


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        ("ValueError: no such card 'abc' for order 17", "ValueError: no such card <text> for order <number>"),
        ("can't parse 'x' at 0x7f32aa", "can't parse <text> at <id>"),
        ('no column "customer_id", `x` or “y”', "no column <text>, <text> or <text>"),
        ("no card of \u2018Ann\u2019 or „Bob“", "no card of <text> or <text>"),
        ("no card of \u2039Bob\u203a, «Ann» or \u203aAnn\u2039", "no card of <text>, <text> or <text>"),
        ("no card of \u201aAnn\u2018, »Bob« or ”Bob”", "no card of <text>, <text> or <text>"),
        (r"""no card of 'O\'Brien' or "the \"Bob\"" here""", "no card of <text> or <text> here"),
        ("in 'Ann's name' and \u2018Ann\u2019s name\u2019", "in <text> and <text>"),
        (r"body {\"name\": \"Ann\"}", "body {<text>: <text>}"),
        ("key reused. Read more: integr8s-idem errors KeyReusedError", "key reused."),
        ("timeout after 3.5 s at https://api.example.com/v1/x?id=7", "timeout after <number> s at <address>"),
        ("connect to db-1.internal:5432 failed", "connect to <address> failed"),
        ("10.0.0.1:6379 and [::1]:80 refuse", "<address> and <address> refuse"),
        ("mail to a.b+c@example.com bounced", "mail to <address> bounced"),
        ("order 3fa85f64-5717-4562-b3fc-2c963f66afa6 is unknown", "order <id> is unknown"),
        ("since 2026-05-01T12:00:00.5Z, or 2026-05-01", "since <time>, or <time>"),
        ("-5 is less than 1,000.5 or 1e9 (50%)", "<number> is less than <number> or <number> (<number>%)"),
        ("timeout after 3.0s, 250ms or 4s; 1.5GiB", "timeout after <number>, <number> or <number>; <number>"),
        ("10.0.0.1-x", "<address>-x"),
        ("order ٣", "order <number>"),
        ("", ""),
    ],
)
def test_ids_numbers_quoted_texts_addresses_and_times_are_replaced(message: str, pattern: str) -> None:
    assert pattern_of(message) == pattern


@given(st.text(max_size=300))
def test_no_digit_remains_and_the_length_is_limited(message: str) -> None:
    pattern = pattern_of(message)

    assert not any(character.isdecimal() for character in pattern)
    assert len(pattern) <= LONGEST
    assert pattern == pattern.strip()


@given(WORDS, st.integers(), st.integers(), WORDS)
def test_messages_that_differ_in_a_number_have_the_same_pattern(before: str, one: int, other: int, after: str) -> None:
    assert pattern_of(f"{before} {abs(one)} {after}") == pattern_of(f"{before} {abs(other)} {after}")


@given(WORDS, st.uuids(), st.uuids(), WORDS)
def test_messages_that_differ_in_a_uuid_have_the_same_pattern(
    before: str, one: object, other: object, after: str
) -> None:
    # A UUID of digits and one "e" would be a number; such UUIDs do not occur.
    assert pattern_of(f"{before} x{one} {after}") == pattern_of(f"{before} x{other} {after}")


@given(st.text("abc de", max_size=20), st.text("abc de?!", max_size=20))
def test_messages_that_differ_in_a_quoted_text_have_the_same_pattern(one: str, other: str) -> None:
    assert pattern_of(f"no such card {one!r} here") == pattern_of(f"no such card {other!r} here")


@given(WORDS)
def test_white_space_does_not_count(message: str) -> None:
    assert pattern_of(f"  {message}\n") == pattern_of(message.strip())


@pytest.mark.parametrize("part", ["a", "a-", "a.", "a@", "'a ", '"', "[:", "1.", "1,", "a:1", "http://", "0-", "e+"])
def test_no_message_takes_long(part: str) -> None:
    assert_quick(part * (MOST_READ // len(part)) + "!")


@pytest.mark.parametrize("part", ["'a'", "\\'a ", '\\"', '"\\', "\u2018a\u2019", "\u201e", "\u00ab", "\u2039"])
def test_no_message_with_quotes_takes_long(part: str) -> None:
    assert_quick(part * (MOST_READ // len(part)) + "!")


def test_an_address_that_never_ends_takes_no_longer() -> None:
    assert_quick("[" + ":" * MOST_READ)


def assert_quick(message: str) -> None:
    seconds = []
    for _ in range(3):
        started = time.process_time()
        pattern_of(message)
        seconds.append(time.process_time() - started)

    assert min(seconds) < 0.01, "it is scanned more than a few times"
