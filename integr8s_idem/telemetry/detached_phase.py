"""Phases that begin in one place and end in another, perhaps in another task."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import Context

from integr8s_idem.telemetry import Span


class DetachedPhase:
    """A phase that is open until `end`.  Only code that runs in `context`, or in a copy of it, is part of it."""

    __slots__ = ("_phase", "context")

    def __init__(self, phase: AbstractContextManager[Span], context: Context) -> None:
        self._phase = phase
        self.context = context
        # Spans are undone in the context in which they were begun.
        context.run(phase.__enter__)

    def end(self, error: BaseException | None = None) -> None:
        """End it.  `error`: what the phase has raised, if it failed."""
        kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
        self.context.run(self._phase.__exit__, kind, error, trace)
