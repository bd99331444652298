"""Every module of the library can be read at once, or says why it is longer."""

from __future__ import annotations

from typing import Final

from tests.packaging.repository import ROOT, files, name_of

LIMIT: Final = 350
"""Lines of a module."""

LONGER: Final = {
    "engine/executor.py": "one path for one piece of work and for a batch, side by side",
    "engine/manager.py": "the public interface: one short method per operation",
    "engine/run.py": "the life of one run: its methods share one state, from the reservation to the outcome",
    "engine/store_client.py": "every call to the store of one manager, with what follows if its answer is lost",
    "errors.py": "one class per error, in one tree, where its readers look it up",
    "handlers/handler.py": "handlers make executions, and executions know their handler",
    "integrations/dishka.py": "one framework per module: its providers side by side",
    "stores/dynamodb/repository.py": "the Protocol of a store, method by method",
    "stores/memory.py": "a whole store, which authors of other stores read from top to bottom",
    "stores/redis/codec.py": "the record format: how it is written and how it is read must be compared",
    "stores/sql/repository.py": "the Protocol of a store, and the subclass that works in the caller's transaction",
    "telemetry/__init__.py": "the Protocol of observers, with the signals and phases that it names",
    "worker/conclusions.py": "every outcome of an item and what follows from it, side by side",
    "worker/consumer.py": "the life of one service, from the first connection to the last commit",
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
