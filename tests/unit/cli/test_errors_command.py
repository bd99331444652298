"""`integr8s-idem errors`: the documentation of errors, for whoever has the package alone."""

from __future__ import annotations

import inspect

import pytest
from typer.testing import CliRunner

from integr8s_idem import errors
from integr8s_idem.cli.app import app
from integr8s_idem.operations.error_sections import error_sections

EVERY = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)]


def asked(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["errors", *words])
    return result.exit_code, result.output


def test_every_error_is_listed_on_a_line_of_its_own() -> None:
    status, said = asked()

    assert status == 0
    assert set(EVERY) <= {line.split()[0] for line in said.splitlines()}
    assert all(len(line.split(maxsplit=1)[1]) < 120 for line in said.splitlines())


@pytest.mark.parametrize("name", ["LeaseLostError", "leaselosterror", "docs/reference/errors.md#leaselosterror"])
def test_an_error_is_found_by_its_name_and_by_what_its_message_tells(name: str) -> None:
    status, said = asked(name)

    assert (status, said.splitlines()[0]) == (0, "LeaseLostError")
    assert "\nTo do. " in said


def test_links_are_told_as_their_words_and_places() -> None:
    every = "\n".join(error_sections().values())

    assert "](" not in every
    assert "replay the dead letter (docs/how-to/replay-a-dead-letter.md)" in error_sections()["PreviouslyFailedError"]
    assert "it is\nIdempotencyConflictError." in error_sections()["InProgressError"]


def test_an_error_that_is_none_is_told_so() -> None:
    status, said = asked("LeaseLost")

    assert status == 2
    assert 'no error of ours is called "LeaseLost" (did you mean "LeaseLostError"?)' in said
