"""The `Idempotency-Key` header in an OpenAPI document, for those who call the API.

class Shop(FastAPI):
    def openapi(self) -> dict[str, Any]:
        return with_idempotency_keys(super().openapi(), required=True)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from integr8s_idem.integrations.http_problems import LONGEST_KEY, MEDIA_TYPE

_QUOTED: Final = r'^"(?:[ !#-\[\]-~]|\\["\\])+"$'
_SCHEMA: Final = "IdempotencyProblem"
_OPERATIONS: Final = frozenset({"get", "put", "post", "delete", "options", "head", "patch", "trace"})

_REFUSALS: Final[Mapping[str, str]] = {
    "400": "The Idempotency-Key is missing or malformed.",
    "401": "The caller is not identified.",
    "409": "A request with this Idempotency-Key is being processed, or was, and its response is gone.",
    "413": "The body is longer than the guard may hold in memory.",
    "422": "The Idempotency-Key was used for another request.",
    "429": "The caller has too many requests with an Idempotency-Key open; the same request may be sent again.",
    "503": "Retries cannot be told apart now; the same request may be sent again.",
}


def with_idempotency_keys(
    document: Mapping[str, Any],
    *,
    required: bool = False,
    methods: Collection[str] = ("POST", "PATCH"),
    paths: Collection[str] | None = None,
    bare_keys: bool = False,
) -> dict[str, Any]:
    """A copy of `document` in which guarded operations have the header, and the responses that refuse a request.

    The other arguments are those of `IdempotencyKeyMiddleware`.
    """
    described = copy.deepcopy(dict(document))
    wanted = {method.lower() for method in methods} & _OPERATIONS
    guarded = None if paths is None else {_without_convertors(path) for path in paths}
    for path, item in described.get("paths", {}).items():
        if guarded is not None and path not in guarded:
            continue
        for method in wanted & item.keys():
            _describe(item[method], required=required, bare_keys=bare_keys)
    described.setdefault("components", {}).setdefault("schemas", {})[_SCHEMA] = _problem()
    return described


def _describe(operation: dict[str, Any], *, required: bool, bare_keys: bool) -> None:
    parameters = operation.setdefault("parameters", [])
    if not any(known.get("name", "").lower() == "idempotency-key" for known in parameters):
        parameters.append(_header(required=required, bare_keys=bare_keys))
    responses = operation.setdefault("responses", {})
    for status, description in _REFUSALS.items():
        response = responses.setdefault(status, {"description": description})
        if "$ref" not in response:
            response.setdefault("content", {})[MEDIA_TYPE] = {"schema": {"$ref": f"#/components/schemas/{_SCHEMA}"}}
    for response in responses.values():
        if "$ref" not in response:
            response.setdefault("headers", {})["Idempotency-Replayed"] = _replayed()


def _header(*, required: bool, bare_keys: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY + 2}
    if not bare_keys:
        schema |= {"minLength": 3, "pattern": _QUOTED}
    return {
        "name": "Idempotency-Key",
        "in": "header",
        "required": required,
        "description": "Makes a retry safe: the same for each try of one request, new for each other request.",
        "schema": schema,
        "example": '"8e03978e-40d5-43dd-bc93-6894a57f9324"',
    }


def _replayed() -> dict[str, Any]:
    return {
        "description": "That this is the response to an earlier request with the same Idempotency-Key.",
        "schema": {"type": "string", "enum": ["true"]},
    }


def _problem() -> dict[str, Any]:
    return {
        "title": _SCHEMA,
        "description": "Why a request was not done, as RFC 9457 has it.",
        "type": "object",
        "required": ["type", "title", "status"],
        "properties": {
            "type": {"type": "string", "format": "uri-reference"},
            "title": {"type": "string"},
            "status": {"type": "integer", "minimum": 400, "maximum": 599},
            "detail": {"type": "string"},
        },
    }


def _without_convertors(path: str) -> str:
    """`/orders/{id:int}` as documents have it: `/orders/{id}`."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
