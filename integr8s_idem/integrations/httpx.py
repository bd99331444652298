"""Keys for the requests that a client sends, and retries that bring the same key.  Needs httpx.

    async with httpx.AsyncClient(transport=RetryingTransport(httpx.AsyncHTTPTransport())) as client:
        await client.post("https://shop.example/orders", json=order)

One key is made for each request, before its first try.  A request that brings a key keeps it: give one that is made of
what the request is about, such as `attempt.key_for("order")`, where the caller itself may be run again.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Final

import httpx

from integr8s_idem.errors import ApplicationError

HEADER: Final = "Idempotency-Key"
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds between two tries, growing from the first to the longest, where the server names no time."""

LONGEST_BODY: Final = 1_048_576
"""Bytes of a response that are awaited before it is handed on; no guard remembers more unless it is told to."""

_TRY_AGAIN: Final = frozenset({408, 409, 425, 429, 502, 503, 504})
"""Answers after which the outcome is not known, or is none: with a key it does no harm to ask again."""


def idempotency_key(text: str) -> str:
    """`text` as the value of the header: a string of RFC 8941, section 3.3.3.

    Raises:
        ApplicationError: It is empty, or has characters that are no printable ASCII.
    """
    if not text or not text.isascii() or not text.isprintable():
        raise ApplicationError(f"an Idempotency-Key is printable ASCII, and this is {text[:80]!r}")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


class _Retries:
    """What both transports share."""

    def __init__(self, retries: int, longest: timedelta, methods: Collection[str]) -> None:
        self._retries = retries
        self._longest = longest.total_seconds()
        self._methods = frozenset(method.upper() for method in methods)

    def pauses(self, request: httpx.Request) -> Iterator[float]:
        """Give `request` a key, and a pause for each time that it may be sent again."""
        if request.method not in self._methods and HEADER not in request.headers:
            return
        if HEADER not in request.headers:
            request.headers[HEADER] = idempotency_key(str(uuid.uuid4()))
        begun = time.monotonic()
        for number in range(self._retries):
            pause = min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) * random.uniform(0.75, 1.25)  # noqa: S311  # jitter
            if time.monotonic() + pause - begun > self._longest:
                return
            yield pause


def _ends_soon(request: httpx.Request, response: httpx.Response) -> bool:
    """Whether to wait for the whole body: if it breaks off, the request can be sent again, and gets it anew.

    A response that streams is handed on as it comes.  Nobody remembers it, and it may have no end.
    """
    if HEADER not in request.headers or response.is_stream_consumed:
        return False
    length = response.headers.get("content-length", "")
    return length.isdecimal() and int(length) <= LONGEST_BODY


def _with_body(response: httpx.Response, body: bytes) -> httpx.Response:
    """As it came, its body encoded as it was."""
    stream = httpx.ByteStream(body)
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


def _passes(response: httpx.Response) -> bool:
    """Whether to ask again may bring another answer: a conflict that passes says when."""
    return response.status_code in _TRY_AGAIN and (response.status_code != 409 or "retry-after" in response.headers)


def _asked_for(response: httpx.Response, pause: float) -> float:
    """The pause that the server wants, in seconds, or ours."""
    wanted = response.headers.get("retry-after", "")
    return max(pause, float(wanted)) if wanted.isdecimal() else pause


class RetryingTransport(httpx.AsyncBaseTransport):
    """Sends requests that change something with a key, and again with the same one when their outcome is not known."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        retries: int = 5,
        longest: timedelta = timedelta(seconds=60),
        methods: Collection[str] = ("POST", "PATCH"),
    ) -> None:
        """`retries`: times that a request is sent again; `longest`: from the first time on, by this machine's clock."""
        self._inner = inner
        self._retrying = _Retries(retries, longest, methods)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.TransportError` if the last try got no answer."""
        pauses = self._retrying.pauses(request)
        await request.aread()
        while True:
            pause = next(pauses, None)
            try:
                response = await self._inner.handle_async_request(request)
                if pause is None or not _passes(response):
                    return await self._whole(request, response)
            except httpx.TransportError:
                if pause is None:
                    raise
            else:
                pause = _asked_for(response, pause)
                await response.aclose()
            await asyncio.sleep(pause)

    async def _whole(self, request: httpx.Request, response: httpx.Response) -> httpx.Response:
        if not _ends_soon(request, response):
            return response
        try:
            return _with_body(response, b"".join([part async for part in response.aiter_raw()]))
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        await self._inner.aclose()


class BlockingRetryingTransport(httpx.BaseTransport):
    """As `RetryingTransport`, for `httpx.Client`."""

    def __init__(
        self,
        inner: httpx.BaseTransport,
        *,
        retries: int = 5,
        longest: timedelta = timedelta(seconds=60),
        methods: Collection[str] = ("POST", "PATCH"),
    ) -> None:
        """As `RetryingTransport`."""
        self._inner = inner
        self._retrying = _Retries(retries, longest, methods)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.TransportError` if the last try got no answer."""
        pauses = self._retrying.pauses(request)
        request.read()
        while True:
            pause = next(pauses, None)
            try:
                response = self._inner.handle_request(request)
                if pause is None or not _passes(response):
                    return self._whole(request, response)
            except httpx.TransportError:
                if pause is None:
                    raise
            else:
                pause = _asked_for(response, pause)
                response.close()
            time.sleep(pause)

    def _whole(self, request: httpx.Request, response: httpx.Response) -> httpx.Response:
        if not _ends_soon(request, response):
            return response
        try:
            return _with_body(response, b"".join(response.iter_raw()))
        finally:
            response.close()

    def close(self) -> None:
        self._inner.close()
