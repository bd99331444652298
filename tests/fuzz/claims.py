"""Assertions that also work inside exception handlers."""

from __future__ import annotations

from tests.campaigns.figures import ViolationError


def must(fact: object, details: object = "") -> None:
    """Raise `ViolationError` unless `fact` is true."""
    if not fact:
        raise ViolationError(str(details)[:2_000])
