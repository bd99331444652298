"""Send requests over a connection of the driver, and pass the responses directly to its parser.

The driver reads through an asyncio stream, which takes eight function calls per response.  From its first request on, a
transport reports to a `DirectExchange` instead, which feeds the same parser, until the connection returns to the driver
or a request fails.  Connecting, TLS, authentication and retries remain the driver's, and so does its `socket_timeout`.

Transport and parser are not public attributes of a connection.  `direct_exchange` checks that they are as expected,
that nothing is left to read, and that the driver does nothing else with responses, such as checking the health of the
connection at intervals; otherwise it returns `None`, and the driver's own methods are to be used.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as LostConnectionError
from redis.exceptions import TimeoutError as NoResponseError

_PENDING: Final[dict[type[Any], object]] = {}
"""By type of parser: what it returns if it needs more data."""

_PUSH: Final[type[Any] | None] = getattr(hiredis, "PushNotification", None)
"""The class of messages that are not responses; older versions of hiredis have none."""


class DirectExchange(asyncio.Protocol):
    """The requests of one connection, one after the other, and their responses."""

    def __init__(
        self, transport: asyncio.Transport, reader: Any, pending: object, loop: asyncio.AbstractEventLoop
    ) -> None:
        """
        Args:
            reader: Parses the responses.
            pending: What it returns if it needs more data.
        """
        self.is_usable = True
        """Whether it can send another request: not after a failure, or if the server sent something on its own."""
        self._transport = transport
        self._usual: Any = transport.get_protocol()
        self._reader = reader
        self._pending = pending
        self._loop = loop
        self._number = 0
        self._answers: list[Any] = []
        self._done: asyncio.Future[list[Any]] | None = None
        """Resolved with the responses; `None` between requests."""
        transport.set_protocol(self)

    def request(self, packed: bytes, number: int) -> asyncio.Future[list[Any]]:
        """Send commands, and return a future of their `number` responses; a refusal of the server is an error in it.

        The future fails with `redis.exceptions.ConnectionError` if the connection was lost or the server asks to
        connect again, and with `InvalidResponse` if a response is not valid.  If it fails or is cancelled, call
        `detach`.
        """
        self._number = number
        self._answers = []
        self._done = done = self._loop.create_future()
        self._transport.write(packed)
        return done

    def detach(self) -> None:
        """Let the transport report to the driver again."""
        self.is_usable = False
        if not self._transport.is_closing() and self._transport.get_protocol() is self:
            self._transport.set_protocol(self._usual)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        done = self._done
        if done is None:
            self._reject_unrequested()
            return
        reader, answers = self._reader, self._answers
        try:
            reader.feed(data)
            while len(answers) < self._number:
                answer = reader.gets()
                if answer is self._pending:
                    return
                if _PUSH is not None and isinstance(answer, _PUSH):
                    raise LostConnectionError("the server sent a push message during a request")
                if isinstance(answer, LostConnectionError):
                    raise answer
                answers.append(answer)
            if reader.has_data():
                self._reject_unrequested()
        except Exception as error:  # noqa: BLE001  # the error of the future
            self._fail(error)
        else:
            if not done.done():
                self._done = None
                done.set_result(answers)

    def eof_received(self) -> bool | None:
        """Note that the server has closed the connection."""
        self._fail(LostConnectionError("the server closed the connection"))
        keeps_open: bool | None = self._usual.eof_received()
        return keeps_open

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection is lost."""
        self._fail(LostConnectionError(f"the connection was lost: {error}"))
        self._usual.connection_lost(error)

    def pause_writing(self) -> None:
        """Pass the call on to the driver's stream, which counts it."""
        self._usual.pause_writing()

    def resume_writing(self) -> None:
        """Pass the call on to the driver's stream, which counts it."""
        self._usual.resume_writing()

    def _reject_unrequested(self) -> None:
        """Close the connection: what nobody requested could be taken for the answer to the next request."""
        self.is_usable = False
        self._transport.close()

    def _fail(self, error: Exception) -> None:
        self.is_usable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class TimedExchange(DirectExchange):
    """An exchange over a connection with a timeout: a request fails if no data arrives for that long."""

    def __init__(
        self,
        transport: asyncio.Transport,
        reader: Any,
        pending: object,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
    ) -> None:
        """`timeout`: in seconds, by the clock of `loop`."""
        super().__init__(transport, reader, pending, loop)
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None

    def request(self, packed: bytes, number: int) -> asyncio.Future[list[Any]]:
        """As without a timeout; the future may also fail with `redis.exceptions.TimeoutError`."""
        done = super().request(packed, number)
        self._start_timer()
        return done

    def detach(self) -> None:
        """Let the transport report to the driver again."""
        self._stop_timer()
        super().detach()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and wait for more of them as long as for the first ones."""
        self._stop_timer()
        super().data_received(data)
        if self._done is not None and not self._done.done():
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self._loop.call_later(self._timeout, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._fail(NoResponseError(f"no data from the server for {self._timeout:g} s, the client's socket_timeout"))

    def _fail(self, error: Exception) -> None:
        self._stop_timer()
        super()._fail(error)


def is_lost(connection: Any) -> bool:
    """Whether the server has closed the connection, which the driver may not have noticed."""
    writer = getattr(connection, "_writer", None)
    return writer is not None and bool(writer.transport.is_closing())


def direct_exchange(connection: Any, loop: asyncio.AbstractEventLoop) -> DirectExchange | None:
    """Attach an exchange to `connection`; `None` if the driver's own methods are to be used.

    `loop`: the running event loop.
    """
    try:
        stream, transport, parser = connection._reader, connection._writer._transport, connection._parser
        reader = parser._reader
        is_busy = bool(stream._buffer) or stream._eof or transport.is_closing()
        is_foreign = stream._loop is not loop  # the driver raises an error that says so
        has_checks, timeout = connection.health_check_interval, connection.socket_timeout
    except AttributeError:
        return None  # not connected, or another version of the driver
    # Connections of a Sentinel's primary act on some errors when they read them.
    reads_itself = type(connection).read_response is not AbstractConnection.read_response
    if is_busy or is_foreign or has_checks or reads_itself or type(reader) is not hiredis.Reader or reader.has_data():
        return None
    kind = type(parser)
    if kind not in _PENDING:
        _PENDING[kind] = reader.gets()  # the reader is empty
    if timeout is not None:
        return TimedExchange(transport, reader, _PENDING[kind], loop, timeout)
    return DirectExchange(transport, reader, _PENDING[kind], loop)
