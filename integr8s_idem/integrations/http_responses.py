"""HTTP responses: storage and replay."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.types import Send

from integr8s_idem.records import StoredResult

MEDIA_TYPE: Final = "application/http"
"""Media type of a stored response: a line of JSON with status and headers, then the body."""

REPLAYED: Final = (b"idempotency-replayed", b"true")

PER_CONNECTION: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
"""Hop-by-hop headers, which apply to one connection only."""

PASSING: Final = PER_CONNECTION | frozenset(
    {
        *("age", "alt-svc", "date", "idempotency-replayed", "retry-after", "server"),
        *("authorization", "authentication-info", "clear-site-data", "proxy-authenticate"),
        *("proxy-authentication-info", "set-cookie", "set-cookie2", "www-authenticate"),
    }
)
"""Headers that apply to one connection, one point in time or one client session; they are not replayed."""

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Response:
    """An ASGI response."""

    status: int
    headers: Headers
    body: bytes = b""

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})

    def stored(self, unstored_headers: Collection[str]) -> StoredResult:
        """Serialize the response for the store as a client gets it, without `unstored_headers`, given in lower case.

        With some statuses a client gets no body, even if the application sends one, and never spaces around a header.
        """
        body, left_out = self.body, {*unstored_headers}
        if self.status in _WITHOUT_BODY:
            body = b""
            left_out.add("content-length")  # the length of a body that is not sent
        headers = []
        for raw_name, value in self.headers:
            name = raw_name.decode("latin-1")
            if name.lower() not in left_out:
                headers.append((name, value.decode("latin-1").strip(" \t")))
        return StoredResult(msgspec.json.encode((self.status, headers)) + b"\n" + body, MEDIA_TYPE)


def response_of(stored: StoredResult) -> Response:
    """Return the response in `stored`, marked as replayed.

    Stored responses are not trusted: the returned response is valid for any server.

    Raises:
        ValueError: `stored` does not hold a response.
    """
    if stored.content_type != MEDIA_TYPE:
        raise ValueError(f"its media type is {stored.content_type[:80]!r}, not {MEDIA_TYPE}")
    head, _, body = stored.body.partition(b"\n")
    try:
        status, headers = json.loads(head)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"its first line is not [status, headers]: {type(error).__name__}") from None
    if type(status) is not int or not 200 <= status <= 599:
        raise ValueError(f"{status!r:.80} is not the status of a response")
    if status in _WITHOUT_BODY and body:
        raise ValueError(f"a response with status {status} has no body, and this one has {len(body)} bytes")
    if not isinstance(headers, list):
        raise ValueError(f"its headers are of type {type(headers).__name__}, not a list")
    return Response(status, [*(_header_of(each, len(body)) for each in headers), REPLAYED], body)


_WITHOUT_BODY: Final = frozenset({204, 304})
_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_VALUE: Final = re.compile(r"(?:[\x21-\x7e\x80-\xff](?:[\t\x20-\x7e\x80-\xff]*[\x21-\x7e\x80-\xff])?)?")


def _header_of(pair: Any, body_length: int) -> tuple[bytes, bytes]:
    """Validate a stored header.

    Raises:
        ValueError: `pair` is not a header that a server may send with a body of this length.
    """
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
        raise ValueError(f"{pair!r:.80} is not a header")
    name, value = pair[0].lower(), pair[1]
    if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value) or name in PER_CONNECTION:
        raise ValueError(f"{pair!r:.80} is not a header that can be sent")
    if name == "content-length" and value != str(body_length):
        raise ValueError(f"its content-length is {value[:80]!r}, and its body has {body_length} bytes")
    return name.encode("latin-1"), value.encode("latin-1")
