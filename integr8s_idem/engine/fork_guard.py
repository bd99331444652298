"""Detects the use of a manager in a child of the process that used it first.

A child made by `os.fork` has a copy of the manager, but not the thread that ran its event loop.  It shares the store's
open connections with its parent, so that each would read answers meant for the other.
"""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from integr8s_idem.errors import ApplicationError


class ForkGuard:
    """Remembers the process in which a manager was first used."""

    forks_now: ClassVar[int] = 0
    """Number of forks between the first process and this one: it changes in the child, and only there.

    Cheaper to compare than the process id, which is a call.
    """

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self.forks: int | None = None
        """The number of forks before the first use."""

    @property
    def is_forked(self) -> bool:
        """Whether the manager was used before this process was forked."""
        return self.forks is not None and self.forks != self.forks_now

    def check(self) -> None:
        """Check that the manager is used in its own process; the first call determines that process.

        Raises:
            ApplicationError: It was used before this process was forked.
        """
        if self.forks == self.forks_now:
            return
        if self.forks is not None:
            raise ApplicationError(
                f"the manager of {self._scope} was used before this process was forked (by os.fork, or by the start "
                'method "fork" of multiprocessing): its event loop and the connections of its store belong to the '
                "parent. Make a manager and a store in each child, or start the children by the method "
                '"spawn"'
            )
        self.forks = self.forks_now


def _count_fork() -> None:
    ForkGuard.forks_now += 1


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_count_fork)
