"""Describe in the span of a delivery how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import Context
from typing import Final

from integr8s_idem.errors import LeaseLostError
from integr8s_idem.handlers.handler import GuardedExecution, HandlerExecution
from integr8s_idem.records import TraceLink
from integr8s_idem.telemetry import DeliveryOutcome, Relation, Span, conventions

_SEVERITY: Final = {outcome: number for number, outcome in enumerate(DeliveryOutcome)}


class RecordedDelivery:
    """The span of a delivery that is recorded, and how its handlers have ended so far."""

    def __init__(self, span: Span, context: Context) -> None:
        """`context` is one in which `span` is current, also after its end."""
        self._span = span
        self._context = context
        self._outcome = DeliveryOutcome.IGNORED
        self._attempt = 0
        self._if_released = DeliveryOutcome.RELEASED

    def observe(self, executions: Sequence[HandlerExecution]) -> None:
        """Let the phases of `executions` be children of the span, and their records name the span."""
        if len(executions) == 1:
            self._span.annotate(conventions.HANDLER, executions[0].handler.name)
        for execution in executions:
            if isinstance(execution, GuardedExecution):
                execution.work.context = self._context
                execution.work.trace = self._span.trace()

    def settled(self, outcome: DeliveryOutcome, attempt: int = 0) -> None:
        """Note that one of its handlers has ended, at `attempt`; 0 if none was made."""
        self._outcome = max(self._outcome, outcome, key=_SEVERITY.__getitem__)
        self.attempted(attempt)

    def link_to_run(self, trace: TraceLink) -> None:
        """Link it to the delivery whose run did the work.  Without a request to the store, no phase has the link."""
        self._span.link(trace, Relation.RUN)

    def failed(self, error: BaseException, attempt: int = 0) -> None:
        """Note that an attempt has failed, or has lost its lease; it will be repeated, unless it ends the service."""
        self._span.fail(error)
        if isinstance(error, LeaseLostError):
            self._if_released = DeliveryOutcome.LOST_LEASE
        elif isinstance(error, Exception):
            self._if_released = DeliveryOutcome.RETRIED
        self.attempted(attempt)

    def attempted(self, attempt: int) -> None:
        """Note that an attempt was made."""
        self._attempt = max(self._attempt, attempt)

    def released(self) -> None:
        """Note that one of its handlers has not ended, so that it will be redelivered."""
        self.settled(self._if_released)

    def dead_lettered(self, reason: str, error: BaseException | str, attempts: int, *, is_decoded: bool) -> None:
        """Note that it was dead-lettered.

        Args:
            reason: From a closed set.
            error: An exception, or text about this message.
            attempts: Number of attempts that were made.
            is_decoded: Whether the message is a valid event.
        """
        self._span.fail(error if isinstance(error, BaseException) else reason)
        self._span.annotate(conventions.DEAD_LETTER_REASON, reason)
        self.settled(DeliveryOutcome.DEAD_LETTERED if is_decoded else DeliveryOutcome.UNDECODABLE, attempts)

    def end(self) -> None:
        """Describe the end of the delivery in its span."""
        self._span.annotate(conventions.OUTCOME, self._outcome.value)
        if self._attempt:
            self._span.annotate(conventions.ATTEMPT, self._attempt)
