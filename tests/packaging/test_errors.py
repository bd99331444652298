"""Every public error is drawn, explained, and survives pickling and copying."""

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
from integr8s_idem.errors import EventError, IdempotencyError, PermanentError, SettingsMistake, StoreError
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
"""Public errors of other modules: of the guard for FastStream, of the harness for tests."""
DRAWN = re.compile(r"^(?P<branch>(?:[│ ] {3})*(?:├── |└── |))(?P<name>[A-Z]\w+Error)\b(?P<words>.*)$", re.MULTILINE)
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


class SoldOutError(Exception):
    """Of an application; equal to its copies."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SoldOutError)

    __hash__ = Exception.__hash__


SAMPLES: dict[object, Any] = {
    str: "order:1",
    bytes: b"\x01\x02",
    bool: True,
    int: 3,
    timedelta: timedelta(seconds=30),
    Mapping[int, Exception]: {1: SoldOutError()},
}


def drawing() -> list[tuple[str, str | None, bool]]:
    """Name, name of the parent, whether it is marked as retryable: line by line."""
    path: list[str] = []
    lines = []
    for line in DRAWN.finditer(errors.__doc__ or ""):
        path[len(line["branch"]) // 4 :] = [line["name"]]
        lines.append((line["name"], path[-2] if len(path) > 1 else None, "(retryable)" in line["words"]))
    return lines


def sample(kind: type[IdempotencyError]) -> IdempotencyError:
    """An instance with some value for each field."""
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
    """What the reference says about an error."""
    found = re.search(rf"^## {kind.__name__}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/reference/errors.md has no section ## {kind.__name__}"
    return found[1]


def test_the_drawing_shows_every_error_below_its_parent() -> None:
    real = {(kind.__name__, kind.__mro__[1].__name__ if kind is not IdempotencyError else None) for kind in ERRORS}

    drawn = [(name, parent) for name, parent, _ in drawing()]

    assert set(drawn) == real
    assert len(drawn) == len(ERRORS)


def test_the_drawing_marks_what_is_retryable() -> None:
    marked = {name for name, _, retryable in drawing() if retryable}

    assert marked == {kind.__name__ for kind in ERRORS if vars(kind).get("retryable")}


@pytest.mark.parametrize("kind", ERRORS)
def test_the_command_that_an_error_names_prints_its_section(kind: type[IdempotencyError]) -> None:
    program, *arguments = sample(kind).read_more.removeprefix("Read more: ").split()

    printed = CliRunner().invoke(app, arguments)

    assert program == "integr8s-idem"
    assert printed.exit_code == 0
    assert printed.stdout.startswith(f"{kind.__name__}\n\n")
    assert kind.__name__.lower() in anchors(PAGE)


def test_an_error_of_the_application_points_at_the_error_that_it_extends() -> None:
    class OutOfStockError(PermanentError): ...

    assert OutOfStockError("none left").read_more == "Read more: integr8s-idem errors PermanentError"


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in BASES])
def test_every_section_says_what_is_known_and_what_to_do(kind: type[IdempotencyError]) -> None:
    told = section(kind)

    assert re.findall(r"^\*\*(.+?)\*\*", told, re.MULTILINE) == ["Known.", "Unknown.", "To do."]


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind not in {*BASES, PermanentError}])
def test_every_message_ends_with_the_place_of_its_section(kind: type[IdempotencyError]) -> None:
    """Those left out have no words of their own: whoever raises them brings some."""
    error = sample(kind)

    assert str(error).endswith(error.read_more)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_errors_that_are_public_elsewhere_have_a_section_too(kind: type[Exception]) -> None:
    told = section(kind)

    assert re.findall(r"^\*\*(.+?)\*\*", told, re.MULTILINE) == ["Known.", "Unknown.", "To do."]
    assert str(kind("why")).endswith(f" Read more: integr8s-idem errors {kind.__name__}")


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_pickling_and_copying(kind: type[IdempotencyError]) -> None:
    error = sample(kind)

    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert (twin.args, vars(twin), str(twin)) == (error.args, vars(error), str(error))
