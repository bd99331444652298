"""`make check` finds words that this project does not use, in prose and in names."""

from __future__ import annotations

import pytest

from tests.packaging import wording


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ('"""Mend the row."""', "Mend"),
        ("def _told_again() -> None: ...", "told"),
        ("`orders` is no topic", "is no t"),
        ("A twin waits.", "twin"),
        ("refuse(theirs)", "theirs"),
        ("# whoever holds it", "whoever"),
        ("The event comes again.", "comes again"),
        ("gives it back", "gives it back"),
        ("def letter_of(topic: str) -> Letter: ...", "letter"),
        ("It needs it not.", "needs it not"),
    ],
)
def test_a_phrase_to_avoid_is_found(line: str, phrase: str) -> None:
    found = list(wording.hits("page.md", ["", line]))

    assert [(hit.place, hit.phrase) for hit in found][:1] == [("page.md:2", phrase)]


def test_a_phrase_to_avoid_is_found_across_two_lines() -> None:
    assert [hit.place for hit in wording.hits("page.md", ["The event comes", "again."])] == ["page.md:2"]


def test_a_dead_letter_may_be_written_across_two_lines() -> None:
    assert list(wording.hits("page.md", ["It is a dead", "letter."])) == []


@pytest.mark.parametrize(
    "line",
    [
        "There is no record.",
        "The lease is no longer valid.",
        "dead_letter_of(topic)",
        "a dead letter, or two dead-letter topics",
        "of yours, hours, amended",
        "lowercase letters, digits and hyphens, starting with a letter",
    ],
)
def test_english_is_left_alone(line: str) -> None:
    assert list(wording.hits("page.md", [line])) == []
