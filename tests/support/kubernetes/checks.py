"""Validate requests: bodies against the published OpenAPI schemas, parameters and rights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from aiohttp import web
from kubernetes_validate import utils as published

PAGE: Final = Path(__file__).parents[3] / "docs" / "how-to" / "run-scripts-on-kubernetes.md"
VERSION: Final = "1.37"
"""Version of the schemas."""
LARGEST_REQUEST: Final = 3 * 1024 * 1024
LARGEST_OBJECT: Final = 1_572_864
"""Default limit of etcd."""

_LIST: Final = {"labelSelector", "fieldSelector", "limit", "continue", "resourceVersion", "resourceVersionMatch"}
_WATCH: Final = {"watch", "timeoutSeconds", "allowWatchBookmarks", "sendInitialEvents"}
PARAMETERS: Final = {
    "create": {"dryRun", "fieldManager", "fieldValidation", "pretty"},
    "get": {"pretty"},
    "delete": {"dryRun", "gracePeriodSeconds", "orphanDependents", "propagationPolicy", "pretty"},
    "list": _LIST | _WATCH,
    "watch": _LIST | _WATCH,
    "log": {
        "container", "follow", "limitBytes", "pretty", "previous", "sinceSeconds", "sinceTime", "tailLines",
        "timestamps",
    },
}  # fmt: skip
"""Parameters of each operation, written by hand: no installed package contains the published paths."""

_NUMBERS: Final = {"timeoutSeconds", "limitBytes", "limit"}
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_POLICIES: Final = {"Orphan", "Background", "Foreground"}
_ROLE: Final = re.compile(r"```yaml\n(.*?kind: Role\n.*?)```", re.DOTALL)


class RefusalError(Exception):
    """An error response of the API."""

    def __init__(self, code: int, reason: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(code, reason, message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after

    @property
    def status(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code,
        }

    def response(self) -> web.Response:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return web.json_response(self.status, status=self.code, headers=headers)


def documented_rights() -> set[tuple[str, str]]:
    """Return the rights as (verb, resource) that the documentation lists."""
    found = _ROLE.search(PAGE.read_text())
    assert found, "the page does not contain a Role"
    rules = yaml.safe_load(found[1])["rules"]
    return {(verb, resource) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def check_parameters(operation: str, query: Mapping[str, str]) -> None:
    """Reject unknown parameters, which the real API ignores."""
    unknown = set(query) - PARAMETERS[operation]
    if unknown:
        raise RefusalError(400, "BadRequest", f"unknown parameters of {operation}: {sorted(unknown)}")
    for name in _NUMBERS & set(query):
        if not query[name].isdigit():
            raise RefusalError(400, "BadRequest", f"{name} is not a number: {query[name]}")
    if query.get("fieldValidation", "Strict") not in {"Ignore", "Warn", "Strict"}:
        raise RefusalError(400, "BadRequest", "fieldValidation must be Ignore, Warn or Strict")


def check_job(job: dict[str, Any]) -> None:
    """Validate a Job strictly against the published schema, and against some rules that schemas cannot express."""
    try:
        published.validate(job, VERSION, strict=True)
    except published.ValidationError as error:
        raise RefusalError(422, "Invalid", f"Job is invalid: {error.json_path}: {error.message}") from None
    name, spec = job["metadata"].get("name", ""), job["spec"]
    if not _NAME.fullmatch(name):
        raise RefusalError(422, "Invalid", f"metadata.name: {name!r} is not a valid label")
    if "podFailurePolicy" in spec and spec["template"]["spec"].get("restartPolicy") != "Never":
        raise RefusalError(422, "Invalid", "spec.podFailurePolicy needs restartPolicy Never")
    for value in job["metadata"].get("labels", {}).values():
        if not re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?", value):
            raise RefusalError(422, "Invalid", f"metadata.labels: {value!r} is not a valid label value")


def check_deletion(options: Mapping[str, Any]) -> None:
    """Check by hand, since the published schema of DeleteOptions requires fields that no client sends."""
    known = {"apiVersion", "kind", "dryRun", "gracePeriodSeconds", "preconditions", "propagationPolicy"}
    if set(options) - known or set(options.get("preconditions", {})) - {"uid", "resourceVersion"}:
        raise RefusalError(400, "BadRequest", f"DeleteOptions has unknown fields: {sorted(options)}")
    if options.get("propagationPolicy", "Orphan") not in _POLICIES:
        raise RefusalError(422, "Invalid", f"propagationPolicy must be one of {sorted(_POLICIES)}")
