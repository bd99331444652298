"""Python's garbage collector, as it suits a process that does nothing but handle events."""

from __future__ import annotations

import gc
from typing import Final

AS_IT_COMES: Final = {(700, 10, 10), (2000, 10, 10), (2000, 10, 0)}
"""Thresholds that Python starts with, by version: whoever has set others knows why."""

SELDOM: Final = 20_000
"""Containers that may have been made since the last look: some waves of deliveries, and a few megabytes at most."""


def collect_seldom() -> None:
    """Look for cycles among what is new, seldom, and never again among what is here already.

    Modules, classes and containers are not garbage before the process ends; a wave of deliveries is, and its cycles
    are few.  With Python's own thresholds a worker spends up to a third of its time looking at both, in vain.
    """
    gc.collect()
    gc.freeze()
    if gc.get_threshold() in AS_IT_COMES:
        gc.set_threshold(SELDOM, *gc.get_threshold()[1:])
