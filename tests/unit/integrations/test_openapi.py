"""The header and the refusals in an OpenAPI document."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from integr8s_idem.integrations.asgi import _QUOTED
from integr8s_idem.integrations.openapi import with_idempotency_keys

DOCUMENT: dict[str, Any] = {
    "openapi": "3.1.0",
    "paths": {
        "/orders": {
            "summary": "orders",
            "get": {"responses": {"200": {}}},
            "post": {"responses": {"201": {}, "422": {"description": "invalid", "content": {"application/json": {}}}}},
        },
        "/orders/{id}": {"patch": {"responses": {"200": {"$ref": "#/components/responses/Order"}}}},
    },
}


def _described(**options: Any) -> dict[str, Any]:
    return with_idempotency_keys(DOCUMENT, **options)["paths"]  # type: ignore[no-any-return]


def test_each_guarded_operation_has_the_header_and_the_refusals_and_no_other_one_has() -> None:
    paths = _described(required=True)
    for operation in (paths["/orders"]["post"], paths["/orders/{id}"]["patch"]):
        [header] = operation["parameters"]
        assert (header["name"], header["in"], header["required"]) == ("Idempotency-Key", "header", True)
        for status in ("400", "409", "413", "422", "503"):
            assert "application/problem+json" in operation["responses"][status]["content"]
    assert paths["/orders"]["get"] == {"responses": {"200": {}}}


def test_what_the_document_says_already_stays() -> None:
    responses = _described()["/orders"]["post"]["responses"]
    assert responses["422"]["description"] == "invalid"
    assert set(responses["422"]["content"]) == {"application/json", "application/problem+json"}
    assert _described()["/orders/{id}"]["patch"]["responses"]["200"] == {"$ref": "#/components/responses/Order"}


def test_the_document_that_was_given_is_left_as_it_was_and_describing_it_twice_does_no_harm() -> None:
    before = copy.deepcopy(DOCUMENT)
    once = with_idempotency_keys(DOCUMENT)
    assert before == DOCUMENT
    assert with_idempotency_keys(once) == once


@pytest.mark.parametrize(
    ("options", "guarded"),
    [
        ({"paths": ["/orders"]}, {"/orders"}),
        ({"paths": ["/orders/{id:int}"]}, {"/orders/{id}"}),
        ({"methods": ["PATCH"]}, {"/orders/{id}"}),
    ],
)
def test_it_describes_what_the_middleware_guards(options: dict[str, Any], guarded: set[str]) -> None:
    said = _described(**options)
    having = {path for path, item in said.items() for method in item.values() if "parameters" in method}
    assert having == guarded


@pytest.mark.parametrize(
    "value", ['"a"', '" "', '"~"', r'"\""', r'"\\"', '"#[]"', '""', '"', 'a"', '"ä"', r'"\a"', '"\x7f"']
)
def test_the_pattern_that_is_told_is_the_one_that_is_kept_to(value: str) -> None:
    [header] = _described()["/orders"]["post"]["parameters"]
    told = re.search(header["schema"]["pattern"], value) is not None
    assert told == (_QUOTED.fullmatch(value) is not None and value != '""')


def test_a_key_without_quotes_is_told_where_it_will_do() -> None:
    [header] = _described(bare_keys=True)["/orders"]["post"]["parameters"]
    assert "pattern" not in header["schema"]
