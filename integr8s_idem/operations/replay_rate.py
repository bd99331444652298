"""Limit the rate at which dead letters are replayed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Final

from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.dead_letter_reader import Page

_RATE: Final = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(?:/([smh]))?")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600}

_BATCH_SECONDS: Final = 0.1
"""Replays of this time are published together."""


def parse_rate(text: str) -> float:
    """Parse a rate such as `50/s`, `100/m` or `5`, which is per second; return it per second.

    Raises:
        ApplicationError: `text` has another form, or is 0.
    """
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) / _SECONDS[found[2] or "s"] if found else 0.0
    if rate <= 0:
        raise ApplicationError(f'invalid rate "{text}"; write a number per second, minute or hour: 50/s, 100/m, 20/h')
    return rate


class ReplayRate:
    """Spreads replays over time, by the event loop's clock.

    Args:
        per_second: Maximum replays per second; `None` for no limit.
    """

    def __init__(self, per_second: float | None) -> None:
        self._per_second = per_second
        self._due = 0.0
        """When the next replay may be published."""

    def parts(self, page: Page) -> Iterator[Page]:
        """Yield `page` in parts, each of which may be published at once."""
        dead_letters, rest = page.dead_letters, page.offsets_read
        size = max(int(self._per_second * _BATCH_SECONDS), 1) if self._per_second else len(dead_letters)
        while len(dead_letters) > size:
            offsets = min(size, rest)
            yield Page(dead_letters[:size], offsets)
            dead_letters, rest = dead_letters[size:], rest - offsets
        yield Page(dead_letters, rest)

    async def wait(self) -> None:
        """Wait until the next part may be published."""
        if (pause := self._due - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(pause)

    def note(self, published: int) -> None:
        """Note how many replays a part has published.  Skipped dead letters take no time."""
        if self._per_second:
            self._due = max(self._due, asyncio.get_running_loop().time()) + published / self._per_second
