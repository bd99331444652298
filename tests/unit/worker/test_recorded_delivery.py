"""How the span of a delivery says that it has ended."""

from __future__ import annotations

from contextvars import copy_context
from datetime import timedelta

from integr8s_idem.errors import LeaseLostError
from integr8s_idem.telemetry import DeliveryOutcome
from integr8s_idem.testing.span_recorder import RecordedSpan, SpanRecorder
from integr8s_idem.worker.recorded_delivery import RecordedDelivery
from tests.support.received import received

LOST = LeaseLostError("order:1", 3, timedelta(seconds=30), "billing", "")


class Delivery:
    """A recorded delivery of a test."""

    def __init__(self) -> None:
        self._recorder = SpanRecorder()
        self._phase = self._recorder.observer("billing").processing(received(), "order_placed", "event-1")
        self.recorded = RecordedDelivery(self._phase.__enter__(), copy_context())

    def ended(self) -> RecordedSpan:
        self.recorded.end()
        self._phase.__exit__(None, None, None)
        return self._recorder.spans().one("process orders")


def test_a_delivery_without_a_handler_is_ignored() -> None:
    span = Delivery().ended()

    assert (span.outcome, span.attempt, span.failed) == ("ignored", 0, False)


def test_the_worst_outcome_of_several_handlers_counts() -> None:
    delivery = Delivery()
    delivery.recorded.settled(DeliveryOutcome.DUPLICATE)
    delivery.recorded.dead_lettered("handler_failed", ValueError("no"), 5, is_decoded=True)
    delivery.recorded.settled(DeliveryOutcome.EXECUTED, 2)

    span = delivery.ended()
    assert (span.outcome, span.attempt, span.error_type) == ("dead_lettered", 5, "ValueError")
    assert span.attributes["idempotency.dead_letter_reason"] == "handler_failed"


def test_a_delivery_that_is_released_after_a_lost_lease_says_so_with_its_attempt() -> None:
    delivery = Delivery()
    delivery.recorded.failed(LOST, LOST.attempt)
    delivery.recorded.released()

    span = delivery.ended()
    assert (span.outcome, span.attempt, span.failed) == ("lost_lease", 3, True)


def test_a_delivery_that_succeeds_after_a_failure_has_failed_in_its_span() -> None:
    delivery = Delivery()
    delivery.recorded.failed(OSError("down"), 1)
    delivery.recorded.settled(DeliveryOutcome.EXECUTED, 2)

    span = delivery.ended()
    assert (span.outcome, span.attempt, span.failed, span.error_type) == ("executed", 2, True, "OSError")


def test_a_reason_without_an_exception_is_the_type_of_the_error() -> None:
    delivery = Delivery()
    delivery.recorded.dead_lettered("no_handler", "it is a replay for another handler", 0, is_decoded=True)

    assert delivery.ended().error_type == "no_handler"
