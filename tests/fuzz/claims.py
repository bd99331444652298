"""Saying what must hold, also where an error is being looked at."""

from __future__ import annotations

from tests.campaigns.figures import ViolationError


def must(fact: object, told: object = "") -> None:
    """Raises `ViolationError` unless `fact` is true."""
    if not fact:
        raise ViolationError(str(told)[:2_000])
