"""The network between a process and a server: slow, lossy, and sometimes it says everything twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

T = TypeVar("T")

USUAL: Final = (0.001, 0.02)
"""Seconds of one way, from and to."""

SLOW: Final = (0.05, 1.5)

IN_ORDER: Final = 1e-5
"""Seconds between two requests on one connection: timers of one moment have no order among themselves."""


class SilenceError(Exception):
    """No answer within the time; whether the request was executed is not known."""


@dataclass(slots=True)
class Weather:
    """How bad the network is.  Numbers are shares of requests."""

    lose_requests: float = 0.0
    lose_replies: float = 0.0
    repeat: float = 0.0
    """The reply is lost, and the driver asks again by itself: executed twice."""
    slow: float = 0.0


@dataclass(slots=True)
class Channel:
    """One connection: what is sent on it is executed in the order of sending."""

    free_at: float = 0.0


class Network:
    """Carries requests.  Servers work outside of all processes: what is on its way arrives though its sender dies."""

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
        """Call it outside of all processes."""
        asyncio.get_running_loop().call_later(seconds, call, context=self._outside)

    def ask(self, execute: Callable[[], T], timeout: float, channel: Channel | None = None) -> asyncio.Future[T]:
        """The answer of `execute`, which happens at the server; `SilenceError` after `timeout` seconds."""
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
                told = execute()
            except Exception as error:  # noqa: BLE001  # carried to who asked
                failure = error
                self.later(back, lambda: _fail(answer, failure))
                return
            if last and not mute:
                self.later(back, lambda: _tell(answer, told))

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
        """Call it outside of all processes, at once."""
        self._outside.run(call)


def _tell(answer: asyncio.Future[T], told: T) -> None:
    if not answer.done():
        answer.set_result(told)


def _fail(answer: asyncio.Future[T], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
