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
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.config.message_text import lacking
from integr8s_idem.errors import ApplicationError

try:
    import httpx
except ModuleNotFoundError as error:
    raise ApplicationError(lacking(__name__, "httpx", error)) from error

HEADER: Final = "Idempotency-Key"
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds between two tries, growing from the first to the longest, where the server names no time."""

LONGEST_HELD: Final = 1_048_576
"""Bytes of a response that is read before it is given back: if it breaks off, the request is sent again."""

_TRY_AGAIN: Final = frozenset({408, 409, 425, 429, 502, 503, 504})
"""Answers after which the outcome is not known, or is none: with a key it does no harm to ask again."""

_HOPELESS: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
"""Requests that cannot be sent."""


def idempotency_key(text: str) -> str:
    """`text` as the value of the header: a string of RFC 8941, section 3.3.3.

    Raises:
        ApplicationError: It is empty, or has characters that are no printable ASCII.
    """
    if not text or not text.isascii() or not text.isprintable():
        raise ApplicationError(f"an Idempotency-Key is printable ASCII, and this is {text[:80]!r}")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@dataclass(frozen=True)
class _Retries:
    """What both transports are told."""

    retries: int
    longest: timedelta
    methods: Collection[str]

    def of(self, request: httpx.Request) -> _Tries | None:
        """Give `request` a key and its tries; `None` if it is sent as it is."""
        if HEADER not in request.headers:
            if request.method not in {method.upper() for method in self.methods}:
                return None
            request.headers[HEADER] = idempotency_key(str(uuid.uuid4()))
        return _Tries(self.retries, time.monotonic() + self.longest.total_seconds())


@dataclass
class _Tries:
    """Of one request."""

    left: int
    until: float
    pause: float = FIRST_PAUSE

    def next_pause(self, response: httpx.Response | None = None) -> float | None:
        """Seconds before the next try, after `response` or none; `None`: there is no next one."""
        if self.left == 0 or (response is not None and not _executor(response)):
            return None
        pause = self.pause * random.uniform(0.75, 1.25)  # noqa: S311  # jitter
        if response is not None:
            pause = _asked_for(response, pause)
        self.left, self.pause = self.left - 1, min(self.pause * 2, LONGEST_PAUSE)
        return pause if time.monotonic() + pause <= self.until else None


def _executor(response: httpx.Response) -> bool:
    """Whether to ask again may bring another answer: a conflict that passes says when."""
    return response.status_code in _TRY_AGAIN and (response.status_code != 409 or "retry-after" in response.headers)


def _asked_for(response: httpx.Response, pause: float) -> float:
    """The pause that the server wants, in seconds, or ours."""
    wanted = response.headers.get("retry-after", "")
    return max(pause, float(wanted)) if wanted.isdecimal() else pause


def _is_short(response: httpx.Response) -> bool:
    """Whether it says that it may be held; one that streams stays a stream."""
    length = response.headers.get("content-length", "")
    return length.isdecimal() and int(length) <= LONGEST_HELD


def _held(response: httpx.Response, body: bytes) -> httpx.Response:
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx.ByteStream(body),
        extensions=response.extensions,
    )


class RetryingTransport(httpx.AsyncBaseTransport):
    """Sends requests that change something with a key, and again with the same one when their outcome is not known."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        retries: int = 5,
        longest: Duration = timedelta(seconds=60),
        methods: Collection[str] = ("POST", "PATCH"),
    ) -> None:
        """`retries`: times that a request is sent again; `longest`: from the first time on, by this machine's clock."""
        self._inner = inner
        self._retries = _Retries(retries, duration(longest, "longest"), methods)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.TransportError` if the last try got no answer."""
        tries = self._retries.of(request)
        if tries is None:
            return await self._inner.handle_async_request(request)
        await request.aread()
        while True:
            try:
                response = await self._answer(request)
            except _HOPELESS:
                raise
            except httpx.TransportError:
                if (pause := tries.next_pause()) is None:
                    raise
            else:
                if (pause := tries.next_pause(response)) is None:
                    return response
                await response.aclose()
            await asyncio.sleep(pause)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if not _is_short(response):
            return response
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            return _held(response, b"".join([part async for part in response.stream]))
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close the transport below."""
        await self._inner.aclose()


class BlockingRetryingTransport(httpx.BaseTransport):
    """As `RetryingTransport`, for `httpx.Client`."""

    def __init__(
        self,
        inner: httpx.BaseTransport,
        *,
        retries: int = 5,
        longest: Duration = timedelta(seconds=60),
        methods: Collection[str] = ("POST", "PATCH"),
    ) -> None:
        """As `RetryingTransport`."""
        self._inner = inner
        self._retries = _Retries(retries, duration(longest, "longest"), methods)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Raises `httpx.TransportError` if the last try got no answer."""
        tries = self._retries.of(request)
        if tries is None:
            return self._inner.handle_request(request)
        request.read()
        while True:
            try:
                response = self._answer(request)
            except _HOPELESS:
                raise
            except httpx.TransportError:
                if (pause := tries.next_pause()) is None:
                    raise
            else:
                if (pause := tries.next_pause(response)) is None:
                    return response
                response.close()
            time.sleep(pause)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        response = self._inner.handle_request(request)
        if not _is_short(response):
            return response
        assert isinstance(response.stream, httpx.SyncByteStream)
        try:
            return _held(response, b"".join(response.stream))
        finally:
            response.close()

    def close(self) -> None:
        """Close the transport below."""
        self._inner.close()
