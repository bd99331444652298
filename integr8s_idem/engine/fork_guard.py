"""Detects the use of a manager in a child of the process that used it first.

A child made by `os.fork` has a copy of the manager, but not the thread that ran its event loop.  It shares the store's
open connections with its parent, so that each would read answers meant for the other.
"""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from integr8s_idem.errors import ApplicationError

_forks = 0
"""Number of forks between the first process and this one.  Cheaper to compare than the process id, which is a call."""


def fork_count() -> int:
    """Return a number that changes in the child, and only there, when the process is forked."""
    return _forks


def _count_fork() -> None:
    global _forks
    _forks += 1
    ForkGuard.forks_now = _forks


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_count_fork)


class ForkGuard:
    """Remembers the process in which a manager was first used."""

    forks_now: ClassVar[int] = 0
    """As `fork_count()`, for code that compares it for each event."""

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self.forks: int | None = None
        """The number of forks before the first use."""

    @property
    def is_forked(self) -> bool:
        """Whether the manager was used before this process was forked."""
        return self.forks is not None and self.forks != _forks

    def check(self) -> None:
        """Check that the manager is used in its own process; the first call determines that process.

        Raises:
            ApplicationError: It was used before this process was forked.
        """
        if self.forks == _forks:
            return
        if self.forks is not None:
            raise ApplicationError(
                f"the manager of {self._scope} was used before this process was forked (by os.fork, or by the start "
                'method "fork" of multiprocessing): its event loop and the connections of its store belong to the '
                "parent. Make a manager and a store in each child, or start the children by the method "
                '"spawn"'
            )
        self.forks = _forks
