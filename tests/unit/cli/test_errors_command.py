"""`integr8s-idem errors`: the documentation of errors on the command line."""

from __future__ import annotations

import inspect
import json

import pytest
from typer.testing import CliRunner

from integr8s_idem import errors
from integr8s_idem.cli.app import app
from integr8s_idem.operations.error_sections import error_sections

EVERY = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)]


def asked(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["errors", *words])
    return result.exit_code, result.output


def test_every_error_is_listed_on_one_line() -> None:
    status, output = asked()

    assert status == 0
    assert set(EVERY) <= {line.split()[0] for line in output.splitlines()}
    assert all(len(line.split(maxsplit=1)[1]) < 120 for line in output.splitlines())


@pytest.mark.parametrize("name", ["LeaseLostError", "leaselosterror", "docs/reference/errors.md#leaselosterror"])
def test_an_error_is_found_by_its_name_and_by_its_link(name: str) -> None:
    status, output = asked(name)

    assert (status, output.splitlines()[0]) == (0, "LeaseLostError")
    assert "\nTo do. " in output


def test_links_are_printed_as_text() -> None:
    every = "\n".join(error_sections().values())

    assert "](" not in every
    assert error_sections()["PreviouslyFailedError"].endswith("See docs/how-to/replay-a-dead-letter.md.")
    assert "then gets IdempotencyConflictError." in error_sections()["InProgressError"]


def test_scripts_get_explanations_by_name() -> None:
    assert json.loads(asked("--json")[1]) == error_sections()
    assert json.loads(asked("leaselosterror", "--json")[1]) == {"LeaseLostError": error_sections()["LeaseLostError"]}


def test_an_unknown_error_is_refused_with_a_suggestion() -> None:
    status, output = asked("LeaseLost")

    assert status == 2
    assert 'unknown error "LeaseLost" (did you mean "LeaseLostError"?)' in output
