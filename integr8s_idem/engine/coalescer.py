"""Many single questions, few batch calls: group commit without a timer.

While one call is under way later questions gather, and they leave together when it returns.
A lone question leaves at once, so nobody waits for company.

Of many, half leave: while the store answers these, this process works on what the others were told.  All in one call
would make both of them wait for each other in turn.

Where the question before was alone, too, its asker makes the call itself: a task and a future for a single
caller cost as much as sending it.  Where it had company, all that is asked in one turn of the event loop goes together.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")

FEW: Final = 8
"""Questions that are not worth two calls."""


class Coalescer(Generic[Question, Answer]):
    """Gathers concurrent questions into calls of at most `max_batch`, one at a time."""

    def __init__(
        self,
        call: Callable[[list[Question]], Awaitable[Sequence[Answer]]],
        *,
        max_batch: int = 500,
        abandoned: Callable[[Question, Answer], None] | None = None,
    ) -> None:
        """`abandoned` receives the answers nobody waits for any more, because the caller was cancelled."""
        self._call = call
        self._max_batch = max_batch
        self._abandoned = abandoned
        self._waiting: deque[tuple[Question, asyncio.Future[Answer]]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._last_size = 0
        """Questions of the last call that a sender made; 0 before the first."""
        self._alone = False
        """An asker makes the call itself now."""
        self._alone_ends: asyncio.Future[None] | None = None
        """For those who wait for that; usually nobody does."""

    def ask(self, question: Question) -> asyncio.Future[Answer]:
        """Await it for the answer.  Cancelling it does not recall the question."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if not self.busy:
            self._begin_sending()
        return answer

    async def answer(self, question: Question) -> Answer:
        """The answer.  A caller who is cancelled before it has that has abandoned it; the question is not recalled."""
        if self._last_size == 1 and not self._waiting and not self.busy:
            return await self._answer_alone(question)
        waiting = self.ask(question)
        try:
            return await waiting
        except asyncio.CancelledError:
            came = waiting.done() and not waiting.cancelled() and waiting.exception() is None
            if came and self._abandoned is not None:
                self._abandoned(question, waiting.result())
            raise

    async def settled(self) -> None:
        """Return once every question asked so far has its answer."""
        if self._alone:
            if self._alone_ends is None:
                self._alone_ends = asyncio.get_running_loop().create_future()
            await self._alone_ends
        if self._sender is not None:
            await asyncio.wait({self._sender})

    @property
    def busy(self) -> bool:
        """Whether somebody's question has no answer yet."""
        return self._alone or (self._sender is not None and not self._sender.done())

    def _begin_sending(self) -> None:
        self._sender = asyncio.get_running_loop().create_task(self._send_all())

    async def _answer_alone(self, question: Question) -> Answer:
        self._alone = True
        try:
            return _all_answers(await self._call([question]), 1)[0]
        except asyncio.CancelledError:
            # It may have been executed, or not: asked again, it is, and nobody waits for what comes of it.
            self.ask(question).cancel()
            raise
        finally:
            self._alone = False
            if self._alone_ends is not None:
                self._alone_ends.set_result(None)
                self._alone_ends = None
            if self._waiting:
                self._begin_sending()

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                size = self._last_size = self._next_size()
                await self._send([self._waiting.popleft() for _ in range(size)])
        finally:
            self._sender = None
            for _, answer in self._waiting:  # only left over if we were cancelled
                answer.cancel()
            self._waiting.clear()

    def _next_size(self) -> int:
        """Of the call that is made now: half of those who ask, as far as the last call and this one tell."""
        waiting = len(self._waiting)
        half = (self._last_size + waiting + 1) // 2
        return min(waiting, max(half, FEW), self._max_batch)

    async def _send(self, batch: list[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            answers = _all_answers(await self._call([question for question, _ in batch]), len(batch))
        except Exception as error:  # noqa: BLE001  # handed to everyone who asked
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(_one_of_its_own(error))
            return
        except BaseException:
            for _, waiting in batch:
                waiting.cancel()
            raise
        for (question, waiting), answer in zip(batch, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)
            elif self._abandoned is not None:
                self._abandoned(question, answer)


def _all_answers(answers: Sequence[Answer], asked: int) -> Sequence[Answer]:
    if len(answers) != asked:
        raise RuntimeError(f"{asked} questions, {len(answers)} answers: which is whose nobody knows")
    return answers


def _one_of_its_own(error: Exception) -> Exception:
    """A copy for each caller: one exception raised in many tasks would mix up their tracebacks."""
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001  # some exceptions cannot be copied: then all share it
        return error
    twin.__cause__ = error.__cause__ or error
    return twin
