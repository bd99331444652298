"""A simulated network that delays, loses and repeats requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

T = TypeVar("T")

USUAL: Final = (0.001, 0.02)
"""Range of the one-way latency in seconds."""

SLOW: Final = (0.05, 1.5)

IN_ORDER: Final = 1e-5
"""Seconds between requests on a connection, since simultaneous timers have no defined order."""


class SilenceError(Exception):
    """No answer before the timeout; the request may have been executed."""


@dataclass(slots=True)
class Weather:
    """The condition of the network, as probabilities per request."""

    lose_requests: float = 0.0
    lose_replies: float = 0.0
    repeat: float = 0.0
    """The reply is lost and the driver retries, so that the request is executed twice."""
    slow: float = 0.0


@dataclass(slots=True)
class Channel:
    """A connection; its requests are executed in the order of sending."""

    free_at: float = 0.0


class Network:
    """Carries requests to servers, which are outside all processes: a request arrives even if its sender dies."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._outside = Context()
        self.weather = Weather()

    def _way(self) -> float:
        weather = self.weather
        if weather.slow and self._random.random() < weather.slow:
            return self._random.uniform(*SLOW)
        return self._random.uniform(*USUAL)

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function later, outside all processes."""
        asyncio.get_running_loop().call_later(seconds, call, context=self._outside)

    def ask(self, execute: Callable[[], T], timeout: float, channel: Channel | None = None) -> asyncio.Future[T]:
        """Run `execute` on the server and return its answer; fail with `SilenceError` after `timeout` seconds."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        random, weather = self._random, self.weather
        lost = weather.lose_requests > 0 and random.random() < weather.lose_requests
        mute = weather.lose_replies > 0 and random.random() < weather.lose_replies
        again = weather.repeat > 0 and random.random() < weather.repeat

        sent = loop.time()
        way, back = self._way(), self._way()
        arrives = sent + way
        if channel is not None:
            arrives = channel.free_at = max(arrives, channel.free_at + IN_ORDER)

        def arrive(last: bool = True) -> None:
            try:
                result = execute()
            except Exception as error:  # noqa: BLE001  # passed on to the caller
                failure = error
                self.later(back, lambda: _fail(answer, failure))
                return
            if last and not mute:
                self.later(back, lambda: _resolve(answer, result))

        if not lost:
            loop.call_at(arrives, arrive, not again, context=self._outside)
            if again:
                loop.call_at(arrives + way, arrive, context=self._outside)
                if channel is not None:
                    channel.free_at = arrives + way
        if lost or mute or again or arrives + back >= sent + timeout:
            self.later(timeout, lambda: _fail(answer, SilenceError()))
        return answer

    def now(self, call: Callable[[], object]) -> None:
        """Call a function immediately, outside all processes."""
        self._outside.run(call)


def _resolve(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
