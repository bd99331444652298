"""Dead letters grouped by handler and error."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integr8s_idem.cli.dlq_output import group_lines
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letter_counts import MAX_GROUPS, OTHERS
from integr8s_idem.operations.dead_letter_filter import DeadLetterFilter
from integr8s_idem.operations.dead_letter_groups import ErrorGroup, GroupedDeadLetters, checked_group_id
from integr8s_idem.operations.dead_letters import StoredDeadLetter
from tests.support.dead_letters import dead_letter_of

START = datetime(2030, 1, 1, tzinfo=UTC)


def failed(number: int, error: BaseException, service: str = "billing") -> StoredDeadLetter:
    """Return a dead letter of order `number`, `number` seconds after the start."""
    at = int((START + timedelta(seconds=number)).timestamp() * 1000)
    return StoredDeadLetter(dead_letter_of(number, error=error, service=service, timestamp=at))


def grouped(dead_letters: Iterable[StoredDeadLetter]) -> GroupedDeadLetters:
    groups = GroupedDeadLetters()
    for dead_letter in dead_letters:
        groups.add(dead_letter)
    return groups


def test_a_group_has_a_count_the_first_and_the_last_time_and_the_latest_as_example() -> None:
    dead_letters = [failed(number, ValueError(f"no such card: {number}")) for number in (5, 9, 1)]
    dead_letters += [failed(4, TimeoutError("no answer within 3 s"))]

    first, second = grouped(dead_letters).as_json()

    assert first == {
        "group": ErrorGroup.of(dead_letters[0]).id,
        "service": "billing",
        "handler": "charge",
        "reason": "handler_failed",
        "error_class": "ValueError",
        "pattern": "ValueError: no such card: <number>",
        "dead_letters": 3,
        "first": "2030-01-01T00:00:01.000Z",
        "last": "2030-01-01T00:00:09.000Z",
        "example": "order_placed.dlq:0:9",
    }
    assert (second["dead_letters"], second["pattern"]) == (1, "TimeoutError: no answer within <number> s")


def test_services_handlers_reasons_and_classes_of_errors_are_kept_apart() -> None:
    error = ValueError("no such card")
    dead_letters = [
        failed(1, error),
        failed(2, error, service="audit"),
        failed(3, LookupError("no such card")),
        StoredDeadLetter(dead_letter_of(4, error=error, reason="previously_failed")),
    ]

    assert [row["dead_letters"] for row in grouped(dead_letters).as_json()] == [1] * 4


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["card", "order"])), min_size=1), st.randoms())
def test_the_order_of_dead_letters_changes_no_group(found: list[tuple[int, str]], order: random.Random) -> None:
    dead_letters = [failed(number, ValueError(f"no such {what} {number}")) for number, what in found]
    shuffled = list(dead_letters)
    order.shuffle(shuffled)

    def rows(groups: GroupedDeadLetters) -> dict[str, tuple[int, datetime, datetime]]:
        return {group.id: (each.count, each.first, each.last) for group, each in groups.rows()}

    assert rows(grouped(dead_letters)) == rows(grouped(shuffled))
    assert grouped(dead_letters).total == len(found)


def test_the_id_of_a_group_selects_its_dead_letters_and_never_changes() -> None:
    card, order = failed(7, ValueError("no such card: 7")), failed(8, ValueError("no such order: 8"))
    chosen = DeadLetterFilter(groups=(ErrorGroup.of(card).id,))

    assert [chosen.matches(one) for one in (card, order, failed(99, ValueError("no such card: 99")))] == [
        True,
        False,
        True,
    ]
    # Operators note ids in runbooks: those of another version or machine must be the same.
    assert ErrorGroup("billing", "charge", "handler_failed", "ValueError", "no such card").id == "380e2c04e42b"
    assert chosen.as_json() == {"group": [ErrorGroup.of(card).id]}


@pytest.mark.parametrize("text", ["", "1bc3e6f4a6d", "1BC3E6F4A6D0", "charge", "*"])
def test_an_invalid_id_of_a_group_is_refused(text: str) -> None:
    with pytest.raises(ApplicationError, match="dlq list --group"):
        checked_group_id(text)


def test_the_number_of_groups_is_limited() -> None:
    dead_letters = [failed(1, ValueError("!" * number)) for number in range(MAX_GROUPS // 10)]
    dead_letters += [failed(1, ValueError("x"), service=f"s{number}") for number in range(MAX_GROUPS)]

    groups = grouped(dead_letters)

    assert groups.total == len(dead_letters)
    assert len(groups.as_json()) == MAX_GROUPS + 1
    (others,) = [row for row in groups.as_json() if row["service"] == OTHERS]
    assert (others["group"], others["dead_letters"]) == ("", MAX_GROUPS // 10)
    # An id would select none of them.
    assert f"(others)      {MAX_GROUPS // 10}  of further groups" in list(group_lines(groups))


def test_groups_are_printed_without_control_characters() -> None:
    dead_letter = failed(3, ValueError("no such card: \x1b[31m3"))

    lines = list(group_lines(grouped([dead_letter])))

    assert lines[0] == "1 dead letter"
    assert lines[2] == f"{ErrorGroup.of(dead_letter).id}  1  billing charge  handler_failed"
    assert lines[4].split() == ["time", "2030-01-01T00:00:03.000Z", "to", "2030-01-01T00:00:03.000Z"]
    assert "\x1b" not in "".join(lines)


def test_groups_show_no_values_from_the_errors_of_their_dead_letters() -> None:
    """Lists are pasted into tickets; `dlq show` prints the error of the example."""
    groups = grouped([failed(3, ValueError("no card for 'ann@shop.example' with token \"f00d\""))])

    printed = "\n".join([*group_lines(groups), json.dumps(groups.as_json())])

    assert "ValueError: no card for <text> with token <text>" in printed
    assert "ann" not in printed
    assert "f00d" not in printed
