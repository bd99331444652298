"""Requests with an idempotency key: their headers, body and address."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from starlette.types import Receive, Scope

from integr8s_idem.integrations.http_problems import LONGEST_KEY

_BODY_EXTENSIONS: Final = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
"""ASGI extensions that would send a body past this middleware."""
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}

_KEY, _HOST, _CONTENT_TYPE = b"idempotency-key", b"host", b"content-type"

_PLAIN: Final = r"[\x20\x21\x23-\x5b\x5d-\x7e]*"
QUOTED: Final = re.compile(rf'"({_PLAIN}(?:\\["\\]{_PLAIN})*)"')
"""A string of RFC 8941, section 3.3.3, without parameters, of which the draft defines none."""

_BARE: Final = re.compile(r"[\x21\x23-\x7e]+")


class RequestHeaders(NamedTuple):
    """The headers that identify a request, each with all its values."""

    keys: list[str]
    hosts: list[str]
    content_types: list[str]


def headers_of(scope: Scope) -> RequestHeaders:
    """Read the headers of a request; servers send their names in lower case."""
    headers = scope["headers"]
    if not isinstance(headers, list):  # any iterable, which the application reads again
        headers = scope["headers"] = list(headers)
    found: dict[bytes, list[str]] = {_KEY: [], _HOST: [], _CONTENT_TYPE: []}
    for name, value in headers:
        if name in found:
            found[name].append(value.decode("latin-1"))
    return RequestHeaders(found[_KEY], found[_HOST], found[_CONTENT_TYPE])


def key_in(given: list[str], *, bare: bool) -> str | None:
    """Return the key in the values of `Idempotency-Key`, or `None` if they are not one valid key.

    `bare`: whether the key may lack its quotes.
    """
    if len(given) != 1:
        return None
    value = given[0].strip(" \t")
    if (quoted := QUOTED.fullmatch(value)) and 0 < len(value) - 2 <= LONGEST_KEY:
        key = quoted[1]
        return re.sub(r"\\(.)", r"\1", key) if "\\" in key else key
    return value if bare and len(value) <= LONGEST_KEY and _BARE.fullmatch(value) else None


async def body_of(receive: Receive, longest: int) -> bytes | None:
    """Return the body, or more than `longest` bytes of a longer one; `None` if the client disconnected."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        return bytes(message.get("body", b""))
    body = bytearray()
    while message["type"] != "http.disconnect":
        body += message.get("body", b"")
        if len(body) > longest or not message.get("more_body", False):
            return bytes(body)
        message = await receive()
    return None


def host_of(hosts: list[str], scope: Scope) -> str:
    """Return the requested host without the default port of its scheme."""
    host = ",".join(hosts).strip().lower()
    return host.removesuffix(_DEFAULT_PORTS.get(scope.get("scheme", "http"), ""))


def path_within(scope: Scope) -> str:
    """Return the path as seen by the application's routes; servers may or may not prepend the root path."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path[len(root) :] if path == root or path.startswith(f"{root}/") else path


def full_path(scope: Scope) -> str:
    """Return the path with the root path, whether or not the server has prepended it."""
    root, path = scope.get("root_path", "").rstrip("/"), str(scope["path"])
    return path if not root or path == root or path.startswith(f"{root}/") else root + path


def normalized(path: str) -> str:
    """Remove the extra slashes that some routers ignore; they must not bypass the guard."""
    return "/" + "/".join(part for part in path.split("/") if part)


def without_body_extensions(scope: Scope) -> Scope:
    """Return `scope` without the extensions that would send a body past this middleware."""
    offered = scope.get("extensions")
    if not offered or _BODY_EXTENSIONS.isdisjoint(offered):
        return scope
    return {**scope, "extensions": {name: value for name, value in offered.items() if name not in _BODY_EXTENSIONS}}
