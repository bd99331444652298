"""Every module of the library can be read at once, or says why it is longer."""

from __future__ import annotations

from typing import Final

from tests.packaging.repository import ROOT, files, name_of

LIMIT: Final = 350
"""Lines of a module."""

LONGER: Final = {
    "errors.py": "one class per error, in one tree, as its readers look it up",
    "engine/manager.py": "the public interface: one short method per operation, most of it docstrings",
    "engine/run.py": "the life of one run: its methods share one state, and a reader follows it from open to finish",
    "engine/executor.py": "the path reserve, run, complete for one and for many, side by side",
    "integrations/dishka.py": "one framework per module: five providers and their docstrings",
    "stores/dynamodb/repository.py": "the Protocol of a store, method by method",
}
"""Modules of `integr8s_idem/` beyond the limit, each with its reason."""


def test_modules_beyond_the_limit_are_listed_with_a_reason() -> None:
    package = ROOT / "integr8s_idem"
    long = {
        name_of(file).removeprefix("integr8s_idem/")
        for file in files(".py")
        if file.is_relative_to(package) and len(file.read_text(encoding="utf-8").splitlines()) > LIMIT
    }

    assert long - LONGER.keys() == set(), "split it, or say why not"
    assert LONGER.keys() - long == set(), "no longer true: remove the reason"
