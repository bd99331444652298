"""A proxy for DynamoDB Local that can throttle, reject credentials and change the time, which DynamoDB Local cannot.

    async with DynamoFront(server.port) as front:
        async with dynamo_client(server.settings(endpoint_url=front.url)) as client:
            front.refuse("ThrottlingException", times=3)
            ...
            assert front.requests == ["PutItem"] * 4

It supports the part of HTTP that the driver uses. Its errors imitate those of DynamoDB.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from email.utils import format_datetime, formatdate, parsedate_to_datetime
from types import TracebackType
from typing import Final, Self

from tests.support.accepting import Acceptor

_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TARGET: Final = re.compile(rb"\r\nx-amz-target: *\w+\.(\w+)", re.IGNORECASE)
_DATE: Final = re.compile(rb"\r\ndate: *([^\r]+)", re.IGNORECASE)


@dataclass
class _Refusal:
    code: str
    status: int
    message: str
    times: int | None
    only: str


class DynamoFront:
    """Forwards requests to a local port, unless it is set to refuse them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.requests: list[str] = []
        """The names of the requests so far, including refused ones."""
        self.ahead = timedelta(0)
        """Offset of the dates in the answers."""
        self.rewrite: Callable[[bytes], bytes] = lambda answer: answer
        """Changes the head and body of an answer before it is forwarded."""
        self._refusals: list[_Refusal] = []
        self._acceptor = Acceptor(self._serve)

    def refuse(
        self, code: str, *, status: int = 400, message: str = "", times: int | None = None, only: str = ""
    ) -> None:
        """Refuse requests from now on.

        Args:
            code: Error code.
            status: HTTP status.
            message: Error message.
            times: Number of requests to refuse; all by default.
            only: Refuse only requests whose names contain this.
        """
        self._refusals = [_Refusal(code, status, message, times, only)]

    def allow(self) -> None:
        self._refusals = []

    @property
    def port(self) -> int:
        return self._acceptor.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self._acceptor.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._acceptor.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            with suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    writer.write(await self._answer(await _message(reader), upstream))
                    await writer.drain()
        finally:
            upstream[1].transport.abort()

    async def _answer(self, request: bytes, upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
        target = _TARGET.search(request)
        assert target is not None, request
        self.requests.append(target[1].decode())
        refusal = self._refusal(self.requests[-1])
        if refusal is not None:
            answer = _refused(refusal)
        else:
            upstream[1].write(request)
            answer = await _message(upstream[0])
        return self.rewrite(_DATE.sub(self._later, answer, count=1))

    def _refusal(self, request: str) -> _Refusal | None:
        refusal = next((one for one in self._refusals if one.only in request), None)
        if refusal is None:
            return None
        if refusal.times is not None:
            refusal.times -= 1
            if refusal.times == 0:
                self._refusals = []
        return refusal

    def _later(self, date: re.Match[bytes]) -> bytes:
        later = parsedate_to_datetime(date[1].decode()) + self.ahead
        return f"\r\nDate: {format_datetime(later, usegmt=True)}".encode()


def _refused(refusal: _Refusal) -> bytes:
    error = {"__type": f"com.amazonaws.dynamodb.v20120810#{refusal.code}", "message": refusal.message}
    body = json.dumps(error).encode()
    date = f"\r\nDate: {formatdate(usegmt=True)}\r\n\r\n"
    head = f"HTTP/1.1 {refusal.status} Refused\r\nx-amzn-RequestId: none\r\n"
    return f"{head}Content-Length: {len(body)}{date}".encode() + body


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Read a complete request or answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return head + await reader.readexactly(int(length[1]) if length else 0)
