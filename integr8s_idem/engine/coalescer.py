"""Combines concurrent single requests into batch calls: group commit without a timer.

While a call is in progress, later requests queue up and are sent together when it returns.  A single request is sent
immediately.

Of many waiting requests only half are sent: while the store processes them, this process works on the answers of the
other half.  With all of them in one call, the store and this process would wait for each other in turn.

If the previous call had a single request, the next requester makes the call itself, because a task and a future cost
as much as the call.  Otherwise all requests of one event loop iteration are sent together.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from typing import Final, Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")

FEW: Final = 8
"""Up to this many requests are sent in one call."""


class Coalescer(Generic[Request, Answer]):
    """Combines concurrent requests into calls of at most `max_batch` requests, one call at a time."""

    _loop: asyncio.AbstractEventLoop
    """The event loop of the sender.  Looked up once per call: before Python 3.12, that is a system call."""

    def __init__(
        self,
        call: Callable[[list[Request]], Awaitable[Sequence[Answer]]],
        *,
        max_batch: int = 500,
        abandoned: Callable[[Request, Answer], None] | None = None,
    ) -> None:
        """`abandoned` receives the answers whose caller was cancelled."""
        self._call = call
        self._max_batch = max_batch
        self._abandoned = abandoned
        self._waiting: deque[tuple[Request, asyncio.Future[Answer]]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._context = copy_context()
        """Of the sender, whose calls serve many requesters: not that of the one that has started it."""
        self._last_size = 0
        """Number of requests in the last call by a sender task; 0 before the first."""
        self._alone = False
        """Whether a requester is making a call itself."""
        self._alone_ends: asyncio.Event | None = None
        """Resolved at the end of that call; made only if there is a waiter."""

    def ask(self, request: Request) -> asyncio.Future[Answer]:
        """Queue a request and return a future of its answer.  Cancelling the future does not withdraw the request."""
        is_sending = self._sender is not None and not self._sender.done()
        if not is_sending:
            self._loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting.append((request, answer))
        if not is_sending and not self._alone:
            self._begin_sending()
        return answer

    def leave_loop(self) -> None:
        """Drop the requests of an event loop that no longer runs: their futures cannot be resolved in another loop.

        If that loop runs again, its call ends there, and changes nothing here.
        """
        self._waiting = deque()
        self._sender = None
        self._last_size = 0
        self._alone = False
        self._alone_ends = None

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request.  If the caller is cancelled, the answer is passed to `abandoned`."""
        if self._last_size != 1 or self._waiting or self._alone or self._sender is not None:
            waiting = self.ask(request)
            try:
                return await waiting
            except asyncio.CancelledError:
                came = waiting.done() and not waiting.cancelled() and waiting.exception() is None
                if came and self._abandoned is not None:
                    self._abandoned(request, waiting.result())
                raise
        # Not in a method of its own: another coroutine takes longer than all of this.
        queue = self._waiting
        self._alone = True
        try:
            answers = await self._call([request])
            if len(answers) != 1:
                raise _unmatched(answers, 1)
            return answers[0]
        except asyncio.CancelledError:
            # The request may or may not have been executed: repeat it, and pass its answer to `abandoned`.
            if queue is self._waiting:
                self.ask(request).cancel()
            raise
        finally:
            if queue is self._waiting:  # otherwise another event loop has taken over
                self._alone = False
                if self._alone_ends is not None:
                    self._alone_ends.set()
                    self._alone_ends = None
                if queue:
                    self._begin_sending()

    async def wait_until_idle(self) -> None:
        """Wait until every request so far has its answer."""
        if self._alone:
            if self._alone_ends is None:
                self._alone_ends = asyncio.Event()
            await self._alone_ends.wait()  # an event, since one of several waiting tasks may be cancelled
        if self._sender is not None:
            await asyncio.wait({self._sender})

    @property
    def busy(self) -> bool:
        """Whether a request has no answer yet."""
        return self._alone or (self._sender is not None and not self._sender.done())

    def _begin_sending(self) -> None:
        self._sender = self._loop.create_task(self._send_all(self._waiting), context=self._context.copy())

    async def _send_all(self, queue: deque[tuple[Request, asyncio.Future[Answer]]]) -> None:
        try:
            while queue:
                size = self._last_size = self._next_size(len(queue))
                await self._send([queue.popleft() for _ in range(size)])
        finally:
            if queue is self._waiting:  # otherwise another event loop has taken over
                self._sender = None
            for _, answer in queue:  # only if this task was cancelled
                answer.cancel()
            queue.clear()

    def _next_size(self, waiting: int) -> int:
        """Return the size of the next call: half of the requests, estimated by the last call and the queue."""
        half = (self._last_size + waiting + 1) // 2
        return min(waiting, max(half, FEW), self._max_batch)

    async def _send(self, batch: list[tuple[Request, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._call([request for request, _ in batch])
            if len(answers) != len(batch):
                raise _unmatched(answers, len(batch))
        except Exception as error:  # noqa: BLE001  # raised to every caller
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(_copy_of(error))
            return
        except BaseException:
            for _, waiting in batch:
                waiting.cancel()
            raise
        for (request, waiting), answer in zip(batch, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)
            elif self._abandoned is not None:
                self._abandoned(request, answer)


def _unmatched(answers: Sequence[object], asked: int) -> RuntimeError:
    return RuntimeError(f"the store returned {len(answers)} answers to {asked} requests, which cannot be matched")


def _copy_of(error: Exception) -> Exception:
    """Copy an exception for one caller; raising one exception in many tasks would mix up their tracebacks."""
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001  # some exceptions cannot be copied; then all callers share it
        return error
    copied.__cause__ = error.__cause__ or error
    return copied
