"""A test kit for users of the library and for those who write a store.

`RepositoryContract` holds a store to the Protocol; it needs pytest and hypothesis, and is imported when it is asked
for: this package alone needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from integr8s_idem.testing.contract import (
        HistorySize,
        RepositoryContract,
        SteppedClock,
        StoreUnderTest,
        TendingContract,
    )

__all__ = ["HistorySize", "RepositoryContract", "SteppedClock", "StoreUnderTest", "TendingContract"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from integr8s_idem.testing import contract

    return getattr(contract, name)
