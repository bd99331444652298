"""The configurations in which the protocol is explored: first those of `make test`, then in order of size.

A state that two configurations reach is counted twice. Since remaining faults are part of a state, this only affects
states in which the faults that distinguish the two have already happened.
"""

from __future__ import annotations

from typing import Final

from tests.model.state import Faults, Setup

_ONE_KEY: Final = ((0,),)
_DUPLICATE: Final = ((0, 0),)
_TWO_KEYS: Final = ((0, 1),)
_TWO_PARTITIONS: Final = ((0,), (1,))

CONFIGURATIONS: Final[tuple[Setup, ...]] = (
    Setup(3, _TWO_KEYS, Faults(crashes=1, unanswered=1)),
    Setup(3, _TWO_KEYS, Faults(crashes=1, moves=1)),
    Setup(3, _DUPLICATE, Faults(crashes=1, moves=1)),
    Setup(3, _ONE_KEY, Faults(crashes=1, moves=1, unanswered=1, failures=1)),
    Setup(3, _TWO_KEYS, Faults(moves=1, failures=1)),
    Setup(3, _TWO_KEYS, Faults(moves=1, unanswered=1)),
    Setup(3, _TWO_KEYS, Faults(moves=1, late=1)),
    Setup(3, _TWO_KEYS, Faults(moves=1, stalls=1)),
    Setup(3, _TWO_KEYS, Faults(moves=1, lost_records=1)),
    Setup(3, _TWO_KEYS, Faults(moves=2)),
    Setup(3, _ONE_KEY, Faults(crashes=1, moves=1, stalls=1, lost_records=1)),
    Setup(3, _TWO_KEYS, Faults(crashes=1, unanswered=1, failures=1)),
    Setup(3, _TWO_PARTITIONS, Faults(crashes=1, moves=1)),
    Setup(3, _ONE_KEY, Faults(crashes=1, moves=2, stalls=1, unanswered=1)),
    Setup(3, _TWO_KEYS, Faults(crashes=1, moves=1, unanswered=1)),
    Setup(3, _TWO_KEYS, Faults(crashes=2, moves=1)),
    Setup(3, _TWO_KEYS, Faults(crashes=1, moves=1, stalls=1)),
    Setup(3, _TWO_KEYS, Faults(crashes=1, moves=2)),
    Setup(3, _ONE_KEY, Faults(crashes=1, moves=1, stalls=1, lost_records=1, failures=1)),
    Setup(3, _TWO_KEYS, Faults(crashes=1, moves=1, failures=1)),
)
