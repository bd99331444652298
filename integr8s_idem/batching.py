"""Many single questions, few batch calls: group commit without a timer.

While one call is under way later questions gather, and they leave together when it returns.
A lone question leaves at once, so nobody waits for company.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Coalescer(Generic[Question, Answer]):
    """Gathers concurrent questions into calls of at most `max_batch`."""

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

    def ask(self, question: Question) -> asyncio.Future[Answer]:
        """Await it for the answer.  Cancelling it does not recall the question."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._waiting.append((question, answer))
        if self._sender is None or self._sender.done():
            self._sender = loop.create_task(self._send_all())
        return answer

    async def answer(self, question: Question) -> Answer:
        """The answer.  A caller who is cancelled in the moment it comes has abandoned it too."""
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
        if self._sender is not None:
            await asyncio.wait({self._sender})

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                size = min(len(self._waiting), self._max_batch)
                await self._send([self._waiting.popleft() for _ in range(size)])
        finally:
            self._sender = None
            for _, answer in self._waiting:  # only left over if we were cancelled
                answer.cancel()
            self._waiting.clear()

    async def _send(self, batch: list[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._call([question for question, _ in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(batch)} questions, {len(answers)} answers: which is whose nobody knows")
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


def _one_of_its_own(error: Exception) -> Exception:
    """A copy for each caller: one exception raised in many tasks would mix up their tracebacks."""
    try:
        twin = copy.copy(error)
    except Exception:  # noqa: BLE001  # some exceptions cannot be copied: then all share it
        return error
    twin.__cause__ = error.__cause__ or error
    return twin
