"""Describe the `Idempotency-Key` header in an OpenAPI document.

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

_PROBLEMS: Final[Mapping[str, str]] = {
    "400": "The Idempotency-Key is missing or malformed.",
    "401": "The caller could not be identified.",
    "409": "A request with this Idempotency-Key is in progress, or was processed and its response is not available.",
    "413": "The body exceeds the size limit for requests with an Idempotency-Key.",
    "422": "The Idempotency-Key was used for another request.",
    "429": "The caller has too many open requests with an Idempotency-Key; retry the same request later.",
    "503": "Idempotency is temporarily unavailable; retry the same request later.",
}


def with_idempotency_keys(
    document: Mapping[str, Any],
    *,
    required: bool = False,
    methods: Collection[str] = ("POST", "PATCH"),
    paths: Collection[str] | None = None,
    bare_keys: bool = False,
) -> dict[str, Any]:
    """Return a copy of `document` that describes the header and the problem responses of guarded operations.

    The other arguments have the same meaning as for `IdempotencyKeyMiddleware`.
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
    for status, description in _PROBLEMS.items():
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
        "description": "Makes retries safe: send one key with each retry, and a new key with a new request.",
        "schema": schema,
        "example": '"8e03978e-40d5-43dd-bc93-6894a57f9324"',
    }


def _replayed() -> dict[str, Any]:
    return {
        "description": "This is the stored response to an earlier request with the same Idempotency-Key.",
        "schema": {"type": "string", "enum": ["true"]},
    }


def _problem() -> dict[str, Any]:
    return {
        "title": _SCHEMA,
        "description": "Why a request was not processed, in the format of RFC 9457.",
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
    """Convert `/orders/{id:int}` to the syntax of OpenAPI, `/orders/{id}`."""
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)
