"""Phases that start in one task and may end in another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import Context

from integr8s_idem.telemetry import Span


class DetachedPhase:
    """A phase that is open until `end`, and current for code that runs in `context` or in a copy of it."""

    __slots__ = ("_phase", "context", "span")

    def __init__(self, phase: AbstractContextManager[Span], context: Context) -> None:
        self._phase = phase
        self.context = context
        # A span must be detached in the context in which it was attached.
        self.span = context.run(phase.__enter__)

    def end(self, error: BaseException | None = None) -> None:
        """End the phase; `error` is the exception that it raised, if any."""
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        self.context.run(self._phase.__exit__, kind, error, trace)
