"""The docstrings of the public API are complete, and their checker finds defects."""

from __future__ import annotations

from pathlib import Path

import griffe

from tests.packaging import docstrings

MODULE = '''
class Base:
    """Base class."""

    def inherited(self) -> list[str]:
        """Return them in the order of their names."""


class Till(Base):
    """Takes money."""

    rate: float
    """The part that is kept."""
    ratio: float
    """The part that is kept."""
    wait_seconds: float = 1

    def __init__(self, timeout: float) -> None:
        """Create the object."""
        if not timeout:
            raise ValueError("no time at all")

    def inherited(self) -> list[str]:
        return []

    def renew(self) -> list[bool]:
        return []

    def silent(self) -> None: ...

    @property
    def total(self) -> int:
        return 0

    def receipts(self) -> list[str]:
        """Return the receipts."""
        return []


def charge(amount: int, wait: float) -> float:
    """Take money."""
    if not amount:
        raise InvalidKeyError("nothing")

    def later() -> None:
        raise KeyError

    raise error


def documented(amount: int, wait: float) -> list[str]:
    """Take money; a receipt for each coin.

    Args:
        wait: In seconds.

    Raises:
        IdempotencyError: Nothing is taken.
    """
    raise InvalidKeyError("nothing")
'''
FOUND = [
    "Till.rate rate is a float without a unit",
    "Till.__init__ raises ValueError, but its docstring does not list it under Raises",
    "Till.__init__ timeout is a float without a unit",
    "Till.silent has no docstring",
    "Till.total has no docstring",
    "Till.receipts returns list[str] without stating the order",
    "charge raises InvalidKeyError, but its docstring does not list it under Raises",
    "charge wait is a float without a unit",
    "charge return value is a float without a unit",
]


def test_docstrings_of_the_public_api_have_no_defects() -> None:
    assert list(map(str, docstrings.problems())) == []


def test_defects_of_docstrings_are_found(tmp_path: Path) -> None:
    (tmp_path / "till.py").write_text(MODULE, encoding="utf-8")
    module = griffe.load("till", search_paths=[tmp_path], docstring_parser="google")

    found = [problem for name in ("Till", "charge", "documented") for problem in docstrings.of(module.members[name])]

    assert sorted(problem.message.removeprefix("till.") for problem in found) == sorted(FOUND)
    (place,) = {
        f"{problem.place}:{problem.line}" for problem in found if problem.message.startswith("till.charge wait")
    }
    assert place == f"till.py:{MODULE.splitlines().index('def charge(amount: int, wait: float) -> float:') + 1}"
