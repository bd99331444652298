"""Schemathesis generates requests from the example's OpenAPI document: responses conform, effects happen once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.python import asgi
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    missing_required_header,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from examples.entries.http_orders import Orders, Shop, application

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    missing_required_header,
    unsupported_method,
]
ANN = {"Authorization": "Bearer ann"}
OPERATIONS = [("POST", "/orders"), ("POST", "/orders/{number}/again"), ("GET", "/orders")]
GUARDED = [(method, path) for method, path in OPERATIONS if method == "POST"]

BOUNDED = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def app() -> Iterator[Shop]:
    yield application()
    asgi.shutdown_lifespans()


@pytest.fixture(scope="module")
def schema(app: Shop) -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.fixture(scope="module")
def orders(app: Shop) -> Orders:
    """Return the orders placed in the application."""
    placed: Orders = asgi._get_portal().call(app.state.dishka_container.get, Orders)
    return placed


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_valid_requests_are_accepted_with_conforming_responses(schema: Any, method: str, path: str) -> None:
    keys = itertools.count()

    @BOUNDED
    @given(case=schema[path][method].as_strategy(GenerationMode.POSITIVE))
    def send(case: Case[Any]) -> None:
        case.headers["Idempotency-Key"] = f'"{path}-taken-{next(keys)}"'
        case.call_and_validate(checks=[*CHECKS, positive_data_acceptance], headers=ANN)

    send()


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_invalid_requests_are_rejected_and_change_nothing(schema: Any, orders: Orders, method: str, path: str) -> None:
    @BOUNDED
    @given(case=schema[path][method].as_strategy(GenerationMode.NEGATIVE))
    def send(case: Case[Any]) -> None:
        before = len(orders.placed)
        response = case.call_and_validate(checks=CHECKS, headers=ANN)
        assert len(orders.placed) - before == (response.status_code == 201)

    send()


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_a_repeated_request_is_handled_once_and_gets_the_same_response(
    schema: Any, orders: Orders, method: str, path: str
) -> None:
    keys = itertools.count()

    @BOUNDED
    @given(case=schema[path][method].as_strategy(GenerationMode.POSITIVE))
    def send_twice(case: Case[Any]) -> None:
        case.headers["Idempotency-Key"] = f'"{path}-twice-{next(keys)}"'
        before = len(orders.placed)
        first = case.call(headers=ANN)
        done = len(orders.placed)
        again = case.call(headers=ANN)

        assert done - before == (first.status_code == 201)
        assert len(orders.placed) == done
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert "idempotency-replayed" not in first.headers
        # A missing order is not stored as an outcome: it may exist on the next attempt.
        assert again.headers.get("idempotency-replayed") == (None if first.status_code == 404 else ["true"])

    send_twice()


def test_a_key_accepts_one_request_and_rejects_different_ones(schema: Any, orders: Orders) -> None:
    statuses: dict[str, int] = {}

    @BOUNDED
    @given(case=schema["/orders"]["POST"].as_strategy(GenerationMode.POSITIVE))
    def send_with_the_same_key(case: Case[Any]) -> None:
        case.headers["Idempotency-Key"] = '"one for all"'
        statuses.setdefault(repr(case.body), case.call(headers=ANN).status_code)

    before = len(orders.placed)
    send_with_the_same_key()

    assert len(orders.placed) == before + 1
    assert list(statuses.values()) == [201] + [422] * (len(statuses) - 1)
    assert len(statuses) > 10
