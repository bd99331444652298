"""httpx transports that add an `Idempotency-Key` to requests and retry them with the same key.

    async with httpx.AsyncClient(transport=RetryingTransport(httpx.AsyncHTTPTransport())) as client:
        await client.post("https://shop.example/orders", json=order)

The transport makes one key per request, before the first attempt.  A request that already has a key keeps it: if the
calling code itself may run again, set a key that is derived from its work, such as `attempt.key_for("order")`.

A handler that gets a response with `Retry-After` can let its event wait for that long: `raise retry_after(response)`.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final

from integr8s_idem.config.durations import Duration, duration
from integr8s_idem.config.message_text import lacking
from integr8s_idem.errors import ApplicationError, RetryAfter

try:
    import httpx
except ModuleNotFoundError as error:
    raise ApplicationError(lacking(__name__, "httpx", error)) from error

HEADER: Final = "Idempotency-Key"
FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0
"""Seconds between retries if the server sends no `Retry-After`; the pause doubles up to the longest."""

LONGEST_HELD: Final = 1_048_576
"""Size limit in bytes for buffered responses; if one is cut off, the request is retried."""

_TRY_AGAIN: Final = frozenset({408, 409, 425, 429, 502, 503, 504})
"""Status codes after which the outcome is unknown or the request was not processed, so that a retry is safe."""

_MOST_DIGITS: Final = 12
"""Digits of a number of seconds; more are thousands of years."""

_PERMANENT: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
"""Errors of requests that cannot be sent."""


def idempotency_key(text: str) -> str:
    """Quote `text` for the header, as a string of RFC 8941, section 3.3.3.

    Raises:
        ApplicationError: `text` is empty or contains characters other than printable ASCII.
    """
    if not text or not text.isascii() or not text.isprintable():
        raise ApplicationError(f"an Idempotency-Key must be printable ASCII, not {text[:80]!r}")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@dataclass(frozen=True)
class _Retries:
    """The options of both transports."""

    retries: int
    longest: timedelta
    methods: Collection[str]

    def of(self, request: httpx.Request) -> _Tries | None:
        """Add a key to `request` and return its retry state; `None` if it is sent unchanged."""
        if HEADER not in request.headers:
            if request.method not in {method.upper() for method in self.methods}:
                return None
            request.headers[HEADER] = idempotency_key(str(uuid.uuid4()))
        return _Tries(self.retries, time.monotonic() + self.longest.total_seconds())


@dataclass
class _Tries:
    """The retry state of one request."""

    left: int
    until: float
    pause: float = FIRST_PAUSE

    def next_pause(self, response: httpx.Response | None = None) -> float | None:
        """Return the seconds before the next attempt, or `None` if there is none left."""
        if self.left == 0 or (response is not None and not _is_retryable(response)):
            return None
        pause = self.pause * random.uniform(0.75, 1.25)  # noqa: S311  # jitter
        if response is not None:
            pause = _pause_for(response, pause)
        self.left, self.pause = self.left - 1, min(self.pause * 2, LONGEST_PAUSE)
        return pause if time.monotonic() + pause <= self.until else None


def _is_retryable(response: httpx.Response) -> bool:
    """Whether a retry may get another answer; a temporary conflict has a `Retry-After` header."""
    return response.status_code in _TRY_AGAIN and (response.status_code != 409 or "retry-after" in response.headers)


def _pause_for(response: httpx.Response, pause: float) -> float:
    """Return the longer of `pause` and the server's `Retry-After`, in seconds."""
    asked = _asked_delay(response)
    return pause if asked is None else max(pause, asked)


def _asked_delay(response: httpx.Response) -> float | None:
    """Return the seconds in the header `Retry-After`; `None` if it is missing or invalid."""
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:_MOST_DIGITS])
    at = _http_date(text)
    if at is None:
        return None
    # By the server's clock, if the response has its time: that of this machine may differ.
    now = _http_date(response.headers.get("date", "")) or datetime.now(UTC)
    return max((at - now).total_seconds(), 0.0)


def _http_date(text: str) -> datetime | None:
    try:
        parsed = parsedate_to_datetime(text)
    except ValueError:
        return None
    # An HTTP date is in GMT, also in the obsolete format that does not say so.
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed


def retry_after(
    response: httpx.Response,
    *,
    default: Duration = timedelta(minutes=1),
    longest: Duration = timedelta(hours=1),
) -> RetryAfter:
    """Make the error that lets a handler's event wait as long as the server of `response` asks for.

        if response.status_code in (429, 503):
            raise retry_after(response)

    Args:
        response: `Retry-After` is a number of seconds or an HTTP date.  A date is compared with the header `Date`, or
            with the clock of this machine if that is missing.
        default: The delay if the header is missing or invalid.
        longest: Maximum delay.
    """
    limit, asked = duration(longest, "longest"), _asked_delay(response)
    delay = duration(default, "default").total_seconds() if asked is None else asked
    reason = f"{response.status_code} {response.reason_phrase}".strip()
    return RetryAfter(min(delay, limit.total_seconds()), reason)


def _is_short(response: httpx.Response) -> bool:
    """Whether its `Content-Length` allows buffering; streaming responses stay streams."""
    length = response.headers.get("content-length", "")
    return length.isdecimal() and int(length) <= LONGEST_HELD


def _buffered(response: httpx.Response, body: bytes) -> httpx.Response:
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx.ByteStream(body),
        extensions=response.extensions,
    )


class RetryingTransport(httpx.AsyncBaseTransport):
    """Adds a key to requests that change state, and retries them with that key if their outcome is unknown."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        *,
        retries: int = 5,
        longest: Duration = timedelta(seconds=60),
        methods: Collection[str] = ("POST", "PATCH"),
    ) -> None:
        """
        Args:
            inner: The transport that sends the requests.
            retries: How many times to retry a request.
            longest: Time limit for the retries of a request, measured from its first attempt.
            methods: The HTTP methods that get a key.
        """
        self._inner = inner
        self._retries = _Retries(retries, duration(longest, "longest"), methods)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request with retries.  Raises `httpx.TransportError` if the last attempt got no answer."""
        tries = self._retries.of(request)
        if tries is None:
            return await self._inner.handle_async_request(request)
        await request.aread()
        while True:
            try:
                response = await self._answer(request)
            except _PERMANENT:
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
            return _buffered(response, b"".join([part async for part in response.stream]))
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close the inner transport."""
        await self._inner.aclose()


class BlockingRetryingTransport(httpx.BaseTransport):
    """A `RetryingTransport` for `httpx.Client`."""

    def __init__(
        self,
        inner: httpx.BaseTransport,
        *,
        retries: int = 5,
        longest: Duration = timedelta(seconds=60),
        methods: Collection[str] = ("POST", "PATCH"),
    ) -> None:
        """See `RetryingTransport`."""
        self._inner = inner
        self._retries = _Retries(retries, duration(longest, "longest"), methods)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request with retries.  Raises `httpx.TransportError` if the last attempt got no answer."""
        tries = self._retries.of(request)
        if tries is None:
            return self._inner.handle_request(request)
        request.read()
        while True:
            try:
                response = self._answer(request)
            except _PERMANENT:
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
            return _buffered(response, b"".join(response.stream))
        finally:
            response.close()

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()
