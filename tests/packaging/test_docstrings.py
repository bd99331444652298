"""The docstrings of the public API say what they have to, and their checker finds what is missing."""

from __future__ import annotations

from pathlib import Path

import griffe

from tests.packaging import docstrings

MODULE = '''
class Base:
    """Of the others."""

    def inherited(self) -> list[str]:
        """In the order of their names."""


class Till(Base):
    """Takes money."""

    rate: float
    """How much of it is kept."""
    ratio: float
    """How much of it is kept."""
    wait_seconds: float = 1

    def __init__(self, timeout: float) -> None:
        """Opens nothing."""
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
        """What was paid."""
        return []


def charge(amount: int, wait: float) -> float:
    """Take money."""
    if not amount:
        raise InvalidKeyError("nothing")

    def later() -> None:
        raise KeyError

    raise error


def told(amount: int, wait: float) -> list[str]:
    """Take money; a receipt for each coin.

    Args:
        wait: In seconds.

    Raises:
        IdempotencyError: Nothing is taken.
    """
    raise InvalidKeyError("nothing")
'''
FOUND = [
    "Till.rate rate is a float, and nothing says of what",
    "Till.__init__ raises ValueError, and its docstring has no Raises: ValueError",
    "Till.__init__ timeout is a float, and nothing says of what",
    "Till.silent has no docstring",
    "Till.total has no docstring",
    "Till.receipts returns list[str], and nothing says in which order",
    "charge raises InvalidKeyError, and its docstring has no Raises: InvalidKeyError",
    "charge wait is a float, and nothing says of what",
    "charge what it returns is a float, and nothing says of what",
]


def test_the_public_api_tells_what_it_has_to() -> None:
    assert list(map(str, docstrings.problems())) == []


def test_what_is_missing_is_found(tmp_path: Path) -> None:
    (tmp_path / "till.py").write_text(MODULE, encoding="utf-8")
    module = griffe.load("till", search_paths=[tmp_path], docstring_parser="google")

    found = [problem for name in ("Till", "charge", "told") for problem in docstrings.of(module.members[name])]

    assert sorted(problem.message.removeprefix("till.") for problem in found) == sorted(FOUND)
    (place,) = {
        f"{problem.place}:{problem.line}" for problem in found if problem.message.startswith("till.charge wait")
    }
    assert place == f"till.py:{MODULE.splitlines().index('def charge(amount: int, wait: float) -> float:') + 1}"
