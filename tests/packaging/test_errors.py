"""Every public error is in the error tree, is documented, and survives pickling and copying."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

from integr8s_idem import errors
from integr8s_idem.cli.app import app
from integr8s_idem.engine.transactions import UnknownCommitError
from integr8s_idem.errors import (
    EventError,
    IdempotencyError,
    PermanentError,
    SettingsMistake,
    StoreError,
    StoreUnavailableError,
)
from integr8s_idem.stores.sql.errors import RecordHeldError
from tests.packaging import reference
from tests.packaging.repository import ROOT, anchors

ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, IdempotencyError)]
BASES = {IdempotencyError, EventError, StoreError}
ELSEWHERE = sorted(
    {
        found
        for entry in reference.entries().values()
        if inspect.isclass(found := getattr(import_module(entry.path.rpartition(".")[0]), entry.thing.name))
        and issubclass(found, Exception)
        and found not in ERRORS
    },
    key=lambda kind: kind.__name__,
)
"""Public errors of other modules: the FastStream guard and the test harness."""
DRAWN = re.compile(
    r"^(?P<branch>(?:[│ ] {3})*(?:├── |└── |))(?P<name>[A-Z]\w+Error|RetryAfter)\b(?P<words>.*)$", re.MULTILINE
)
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


class SoldOutError(Exception):
    """An error of an application that compares equal to its copies."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SoldOutError)

    __hash__ = Exception.__hash__


SAMPLES: dict[object, Any] = {
    str: "order:1",
    bytes: b"\x01\x02",
    bool: True,
    int: 3,
    timedelta: timedelta(seconds=30),
    timedelta | float: timedelta(seconds=30),
    Mapping[int, Exception]: {1: SoldOutError()},
}


def error_tree() -> list[tuple[str, str | None, bool]]:
    """Return the lines of the tree: name, name of the parent, whether the error is marked as retryable."""
    path: list[str] = []
    lines = []
    for line in DRAWN.finditer(errors.__doc__ or ""):
        path[len(line["branch"]) // 4 :] = [line["name"]]
        lines.append((line["name"], path[-2] if len(path) > 1 else None, "(retryable)" in line["words"]))
    return lines


def sample(kind: type[IdempotencyError]) -> IdempotencyError:
    """Create an instance with a value for each field."""
    initializer: Any = kind.__init__
    if initializer is not IdempotencyError.__init__:
        names, hints = list(inspect.signature(initializer).parameters)[1:], get_type_hints(initializer)
    elif kind._fields:
        names, hints = list(kind._fields), get_type_hints(kind)
    else:
        return kind("the card was stolen")
    mistakes = (SettingsMistake("store.url", "is not a Redis URL"),)
    return kind(*[SAMPLES.get(hints[name], mistakes) for name in names])


def section(kind: type[Exception]) -> str:
    """Return the section of the reference about an error."""
    found = re.search(rf"^## {kind.__name__}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/reference/errors.md has no section ## {kind.__name__}"
    return found[1]


def test_the_error_tree_shows_every_error_below_its_parent() -> None:
    expected = {(kind.__name__, kind.__mro__[1].__name__ if kind is not IdempotencyError else None) for kind in ERRORS}

    listed = [(name, parent) for name, parent, _ in error_tree()]

    assert set(listed) == expected
    assert len(listed) == len(ERRORS)


def test_the_error_tree_marks_retryable_errors() -> None:
    marked = {name for name, _, retryable in error_tree() if retryable}

    assert marked == {kind.__name__ for kind in ERRORS if vars(kind).get("retryable")}


@pytest.mark.parametrize("kind", ERRORS)
def test_the_command_in_an_error_prints_its_section(kind: type[IdempotencyError]) -> None:
    program, *arguments = sample(kind).read_more.removeprefix("Read more: ").split()

    printed = CliRunner().invoke(app, arguments)

    assert program == "integr8s-idem"
    assert printed.exit_code == 0
    assert printed.stdout.startswith(f"{kind.__name__}\n\n")
    assert kind.__name__.lower() in anchors(PAGE)


def test_an_application_error_refers_to_the_library_error_that_it_extends() -> None:
    class OutOfStockError(PermanentError): ...

    assert OutOfStockError("none left").read_more == "Read more: integr8s-idem errors PermanentError"


@pytest.mark.parametrize("kind", [RecordHeldError, UnknownCommitError])
def test_an_internal_error_refers_to_the_error_that_it_extends(kind: type[StoreUnavailableError]) -> None:
    assert kind("order:7", "no answer").read_more == "Read more: integr8s-idem errors StoreUnavailableError"


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in BASES])
def test_every_section_has_known_unknown_and_remedy(kind: type[IdempotencyError]) -> None:
    text = section(kind)

    assert re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE) == ["Known.", "Unknown.", "To do."]


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in {*BASES, PermanentError}])
def test_every_message_ends_with_the_command_for_its_section(kind: type[IdempotencyError]) -> None:
    """Base classes and PermanentError are excluded: their messages come from the code that raises them."""
    error = sample(kind)

    assert str(error).endswith(error.read_more)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_public_errors_of_other_modules_have_a_section_too(kind: type[Exception]) -> None:
    text = section(kind)

    assert re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE) == ["Known.", "Unknown.", "To do."]
    assert str(kind("why")).endswith(f" Read more: integr8s-idem errors {kind.__name__}")


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_pickling_and_copying(kind: type[IdempotencyError]) -> None:
    error = sample(kind)

    for clone in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(clone) is kind
        assert (clone.args, vars(clone), str(clone)) == (error.args, vars(error), str(error))
