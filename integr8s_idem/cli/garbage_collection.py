"""Tune Python's garbage collector for a process that only handles events."""

from __future__ import annotations

import gc
from typing import Final

DEFAULT_THRESHOLDS: Final = {(700, 10, 10), (2000, 10, 10), (2000, 10, 0)}
"""Python's default thresholds, by version.  Other values were set on purpose and are kept."""

RARE_THRESHOLD: Final = 20_000
"""Number of new containers before a collection: a few batches of deliveries, and a few megabytes at most."""


def collect_rarely() -> None:
    """Collect new objects rarely, and existing objects never again.

    Modules, classes and containers live as long as the process; a batch of deliveries creates few reference cycles.
    With Python's default thresholds, a worker spends up to a third of its time on fruitless collections.
    """
    gc.collect()
    gc.freeze()
    if gc.get_threshold() in DEFAULT_THRESHOLDS:
        gc.set_threshold(RARE_THRESHOLD, *gc.get_threshold()[1:])
