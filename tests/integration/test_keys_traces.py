"""From the span of a worker to its record with `integr8s-idem keys explain`, and back, on real Kafka and Redis."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from integr8s_idem import EventRouter
from integr8s_idem.telemetry import conventions
from integr8s_idem.testing.span_recorder import RecordedSpan, SpanRecorder
from tests.support.kafka.broker import Kafka
from tests.support.keys_desk import Desk
from tests.support.workers import QUICK, OrderPlaced, open_shop

pytestmark = pytest.mark.kafka

ORDER = OrderPlaced(order_id="7", event_id="order-7")


class Traces:
    """A worker with recorded spans, and the `keys` commands of its operators."""

    def __init__(self, kafka: Kafka, prefix: str, redis_url: str, folder: Path) -> None:
        self._kafka, self._prefix, self._redis_url = kafka, prefix, redis_url
        more = f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\ntopic_prefix = "{prefix}"\n'
        self.desk = Desk(folder, f'kind = "redis"\nurl = "{redis_url}"', more)

    def delivered(self, *errors: Exception, copies: int = 1, are_recorded: bool = True) -> list[RecordedSpan]:
        """Deliver copies of the order to a worker whose first runs fail, and return the spans of the deliveries."""
        return asyncio.run(self._delivered(list(errors), copies, are_recorded))

    async def _delivered(self, errors: list[Exception], copies: int, are_recorded: bool) -> list[RecordedSpan]:
        recorder, router = SpanRecorder(), EventRouter()

        @router.on(OrderPlaced, name="charge")
        async def charge(event: OrderPlaced) -> str:
            if errors:
                raise errors.pop(0)
            return "receipt-7"

        async with open_shop(self._kafka, self._prefix, self._redis_url) as shop:
            if are_recorded:
                shop.observer = recorder.observer("billing")
            worker = await shop.worker(router, service=QUICK, max_attempts=3)
            for number in range(copies):
                await shop.deliver(ORDER)
                await worker.idle(settled=number + 1)
            return recorder.spans().named(f"process {shop.topic}")


@pytest.fixture
def traces(kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path) -> Traces:
    return Traces(kafka, topic_prefix, redis_url, tmp_path)


def delivery(span: RecordedSpan) -> str:
    return str(span.attributes[conventions.DELIVERY])


@pytest.mark.parametrize("errors", [[], [OSError("the bank is down")]], ids=["first attempt", "second attempt"])
def test_the_delivery_of_a_span_leads_to_the_record_which_names_the_span(
    traces: Traces, errors: list[Exception]
) -> None:
    [span] = traces.delivered(*errors)

    answer = traces.desk.explained(delivery(span))

    [record] = answer["records"]
    assert (record["status"], record["attempt"]) == ("completed", span.attempt)
    assert (record["trace_id"], record["span_id"]) == (span.trace_id, span.span_id)


def test_the_ids_are_printed_on_rows_of_their_own(traces: Traces) -> None:
    [span] = traces.delivered()

    printed = traces.desk.typed("explain", delivery(span)).stdout.splitlines()

    assert [line.split() for line in printed if line.strip().startswith(("trace ", "span "))] == [
        ["trace", span.trace_id],
        ["span", span.span_id],
    ]


def test_the_span_of_a_duplicate_leads_to_the_span_that_did_the_work(traces: Traces) -> None:
    first, duplicate = traces.delivered(copies=2)

    [record] = traces.desk.explained(delivery(duplicate))["records"]

    assert duplicate.outcome == "duplicate"
    assert record["span_id"] == first.span_id == duplicate.child("idempotency.replay").links["run"].span_id


def test_a_record_without_a_recorded_trace_says_so(traces: Traces) -> None:
    assert traces.delivered(are_recorded=False) == []

    printed = traces.desk.typed("explain", ORDER.event_id).stdout

    assert "trace          not recorded: spans are off, or its trace was not sampled\n" in printed
