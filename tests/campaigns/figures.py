"""Campaigns, their figures, and the error for a broken promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


class ViolationError(AssertionError):
    """A promise was broken; the message gives the promise and the evidence."""


class Figures(Counter[str]):
    """Counts by name; `update` adds the counts of another run.

    Common names: `lost`, `repeats` (outside the fenced sink, each recognizable as a repeat), `fenced_repeats`,
    `events`, `takeovers`.  Campaigns add their own: `kills`, `seeds`, `states`, …
    """


@dataclass(frozen=True)
class Campaign:
    """A series of numbered runs of one kind."""

    name: str
    counts: str
    """The figure that measures the campaign's size: `kills`, `seeds`, …"""
    says: str
    """Description of one unit of `counts`, for the fault matrix."""
    scenarios: tuple[int, ...]
    """Rows of `scenarios.toml` that the campaign covers."""
    in_test: int
    """Number of runs in `make test`."""
    target: int
    """Value of `counts` at which `make faults` stops."""
    batch: int
    """Runs between two saves of the record; about a minute's worth."""
    run: Callable[[int, int], Figures]
    """`run(first, count)` executes the runs numbered `first` to `first + count - 1`.  The number seeds the run, so
    that it can be repeated as far as the servers allow.  Raises a `ViolationError` that names the number."""
    at_least: int | None = None
    """Minimum of `counts` in `make test`, if it is not one per run."""
    on_page: tuple[int, int] | None = None
    """Size in `make test` and target on a machine with all servers, for campaigns that run less on others: the matrix
    must be the same on every machine."""

    @property
    def shown_in_test(self) -> int:
        """Value of `counts` in `make test`."""
        return self.in_test if self.at_least is None else self.at_least

    @property
    def stated(self) -> tuple[int, int]:
        """Size in `make test` and target, as shown in the fault matrix."""
        return (self.shown_in_test, self.target) if self.on_page is None else self.on_page
