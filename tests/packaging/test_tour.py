"""The code tour names existing functions in the order in which they run."""

from __future__ import annotations

import importlib
import re
import sys
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import integr8s_idem
from integr8s_idem._util import speedups
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import ParcelSent, all_committed, dispatcher_of, sent

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "a-tour-of-the-code.md").read_text()
ROW = re.compile(r"^\|[^|]*\| `([\w.]+)` \| `([\w/]+)\.py` \|", re.MULTILINE)
STEPS = [(name, f"{module}.py") for name, module in ROW.findall(PAGE)]


@pytest.mark.parametrize(("name", "file"), STEPS)
def test_each_function_of_the_tour_exists_in_its_file(name: str, file: str) -> None:
    module = importlib.import_module("integr8s_idem." + file.removesuffix(".py").replace("/", "."))

    assert callable(reduce(getattr, name.split("."), module))


def test_functions_named_below_the_table_exist() -> None:
    below = PAGE[PAGE.rindex("| **Commit**") :].split("\n\n", 1)[1]
    sources = [file.read_text() for file in Path(integr8s_idem.__file__).parent.rglob("*.py")]

    for owner, name in re.findall(r"`(\w+)\.(\w+)`", below):
        defined = re.compile(rf"^class {owner}\b.*?^    (async )?def {name}\b", re.MULTILINE | re.DOTALL)
        assert any(defined.search(source) for source in sources), f"{owner}.{name}"


async def test_handling_an_event_calls_the_functions_in_the_order_of_the_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "native", None)  # the tour describes the Python code
    handled: list[ParcelSent] = []

    async def handle(event: ParcelSent) -> None:
        handled.append(event)

    calls = await _calls_of(handle)
    assert len(handled) == 1

    remaining = iter(calls)
    for step in STEPS:
        assert step in remaining, f"{step} is not called, or is called before the previous step"


async def _calls_of(handle: Any) -> list[tuple[str, str]]:
    """Return the library functions that run for one event, as name and file, in the order of their first calls."""
    folder = str(Path(integr8s_idem.__file__).parent) + "/"
    calls: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, what: str, _: object) -> None:
        code = frame.f_code
        if what == "call" and code.co_filename.startswith(folder):
            calls[code.co_qualname, code.co_filename.removeprefix(folder)] = None

    async with running(dispatcher_of(handle, guarded()), sent(1), ordering="none") as worker:
        sys.setprofile(note)
        try:
            await worker.until(lambda: all_committed(worker))
        finally:
            sys.setprofile(None)
    return list(calls)
