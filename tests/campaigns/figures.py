"""What a campaign counts, and how it says that a promise was broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass


class ViolationError(AssertionError):
    """A promise was broken; the message says which, and with what."""


class Figures(Counter[str]):
    """What was counted, by name; sums up with `+=`-like `update`.

    Known names: `lost`, `repeats` (outside the fenced sink; each was owned up to), `fenced_repeats`,
    `events`, `takeovers`; a campaign adds its own (`kills`, `seeds`, `states`, …).
    """


@dataclass(frozen=True)
class Campaign:
    """One kind of run, as many as wanted."""

    name: str
    counts: str
    """The figure that its size is measured in: `kills`, `seeds`, …"""
    says: str
    """What one of them is, for the matrix."""
    scenarios: tuple[int, ...]
    """Numbers in `scenarios.toml` that it covers."""
    in_test: int
    """How many runs `make test` makes."""
    target: int
    """How many `make faults` goes for."""
    batch: int
    """Runs (numbers) between two savings of the record; about a minute's worth."""
    run: Callable[[int, int], Figures]
    """`run(first, count)`: the runs numbered `first` to `first + count - 1`.  A number is the seed of its run:
    the same number is the same run as far as the servers allow.  Raises `ViolationError` that names the number."""
    at_least: int | None = None
    """How many of what it counts `make test` must see, where that is not one a run."""
    on_page: tuple[int, int] | None = None
    """What `make test` shows and the target where all servers are, of a campaign that makes less where some are not:
    the matrix says the same on every machine."""

    @property
    def shown_in_test(self) -> int:
        """How many of what it counts `make test` shows."""
        return self.in_test if self.at_least is None else self.at_least

    @property
    def stated(self) -> tuple[int, int]:
        """What `make test` shows and the target, as the matrix says them."""
        return (self.shown_in_test, self.target) if self.on_page is None else self.on_page
