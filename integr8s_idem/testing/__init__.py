"""A test kit for applications and for implementations of stores.

`WorkerHarness` runs the services of an application in a test; `integr8s_idem.testing.plugin` is a pytest plugin.
`RepositoryContract` is a test suite for stores.  Names are imported lazily, so that this package needs neither pytest
nor hypothesis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from integr8s_idem.testing.contract import (
        HistorySize,
        RecordAdminContract,
        RepositoryContract,
        SteppedClock,
        StoreUnderTest,
    )
    from integr8s_idem.testing.crash_points import CrashPoint
    from integr8s_idem.testing.embedded_harness import EmbeddedHarness
    from integr8s_idem.testing.faults import Fault
    from integr8s_idem.testing.flaky_store import FlakyStore
    from integr8s_idem.testing.harness import NotReachedError, WorkerHarness, recorded_spans
    from integr8s_idem.testing.harness_run import NotSettledError
    from integr8s_idem.testing.memory_broker import StoredMessage
    from integr8s_idem.testing.observations import DeadLetterSeen, HandlerRun
    from integr8s_idem.testing.span_recorder import RecordedSpan, RecordedSpans

__all__ = [
    "CrashPoint",
    "DeadLetterSeen",
    "EmbeddedHarness",
    "Fault",
    "FlakyStore",
    "HandlerRun",
    "HistorySize",
    "NotReachedError",
    "NotSettledError",
    "RecordAdminContract",
    "RecordedSpan",
    "RecordedSpans",
    "RepositoryContract",
    "SteppedClock",
    "StoreUnderTest",
    "StoredMessage",
    "WorkerHarness",
    "recorded_spans",
]

_MODULES: Final = {
    "CrashPoint": "crash_points",
    "DeadLetterSeen": "observations",
    "EmbeddedHarness": "embedded_harness",
    "FlakyStore": "flaky_store",
    "HandlerRun": "observations",
    "Fault": "faults",
    "NotReachedError": "harness",
    "NotSettledError": "harness_run",
    "StoredMessage": "memory_broker",
    "RecordedSpan": "span_recorder",
    "RecordedSpans": "span_recorder",
    "WorkerHarness": "harness",
    "recorded_spans": "harness",
}
"""The module of each name; the others are in `contract`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'contract')}"), name)
