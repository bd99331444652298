"""The `Idempotency-Key` header and the problem responses in an OpenAPI document."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from integr8s_idem.integrations.http_requests import QUOTED
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


def test_only_guarded_operations_have_the_header_and_the_problem_responses() -> None:
    paths = _described(required=True)
    for operation in (paths["/orders"]["post"], paths["/orders/{id}"]["patch"]):
        [header] = operation["parameters"]
        assert (header["name"], header["in"], header["required"]) == ("Idempotency-Key", "header", True)
        for status in ("400", "409", "413", "422", "503"):
            assert "application/problem+json" in operation["responses"][status]["content"]
    assert paths["/orders"]["get"] == {"responses": {"200": {}}}


def test_existing_response_descriptions_are_kept() -> None:
    responses = _described()["/orders"]["post"]["responses"]
    assert responses["422"]["description"] == "invalid"
    assert set(responses["422"]["content"]) == {"application/json", "application/problem+json"}
    assert _described()["/orders/{id}"]["patch"]["responses"]["200"] == {"$ref": "#/components/responses/Order"}


def test_the_document_is_copied_and_describing_it_twice_is_idempotent() -> None:
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
def test_options_select_the_described_operations(options: dict[str, Any], guarded: set[str]) -> None:
    paths = _described(**options)
    described = {path for path, item in paths.items() for method in item.values() if "parameters" in method}
    assert described == guarded


@pytest.mark.parametrize(
    "value", ['"a"', '" "', '"~"', r'"\""', r'"\\"', '"#[]"', '""', '"', 'a"', '"ä"', r'"\a"', '"\x7f"']
)
def test_the_documented_pattern_matches_the_accepted_keys(value: str) -> None:
    [header] = _described()["/orders"]["post"]["parameters"]
    matches = re.search(header["schema"]["pattern"], value) is not None
    assert matches == (QUOTED.fullmatch(value) is not None and value != '""')


def test_bare_keys_have_no_pattern() -> None:
    [header] = _described(bare_keys=True)["/orders"]["post"]["parameters"]
    assert "pattern" not in header["schema"]
