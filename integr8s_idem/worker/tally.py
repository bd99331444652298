"""Counts of one worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the start of a worker."""

    handled: int = 0
    reruns: int = 0
    """Handled at the second or a later attempt."""
    reconciled: int = 0
    """Handled without a run, because a reconcile function found the effect of an earlier attempt."""
    duplicates: int = 0
    """Not handled, since an earlier run had completed."""
    waits: int = 0
    retries: int = 0
    dead_letters: int = 0
    deferred: int = 0
    """Settled, since a copy waits in a retry topic."""
    discarded: int = 0
    """Settled although their handlers failed, by a rule."""
    leases_lost: int = 0
    stale: int = 0
    """Settled after the partition was revoked, so not committed by this worker."""
