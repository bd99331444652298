"""The relay: publishes what transactions have left in the outbox.

In the order of the rows for each Kafka key; one that cannot be published now holds up its own key only.  Where many
of a topic cannot, a round leaves the rest of that topic to the next, which goes on behind them: the others do not wait
for all of its timeouts.  A relay that dies between the broker's confirmation and the row's end lets the next one
publish it again, with its id.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

from integr8s_idem.errors import EventTooLargeError, PublishError, StoreError
from integr8s_idem.stores.outbox import Claim, Outbox, Waiting
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.publisher import EventPublisher

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
"""Time between two looks for what other processes have left; one's own is published at once."""

MOST_REFUSED: Final = 100
"""Kafka keys of one topic that cannot be published, after which a round tries no more of that topic."""


class Relay:
    """Publishes from one outbox.  Any number of them may work on it, in any number of processes."""

    def __init__(self, outbox: Outbox, publisher: EventPublisher, *, claim_seconds: float) -> None:
        """`claim_seconds`: for how long buckets are claimed; more than twice the publisher's timeout."""
        self._outbox = outbox
        self._publisher = publisher
        self._claim = timedelta(seconds=claim_seconds)
        self._backoff = Backoff(initial=0.2, longest=5.0)
        self._stopping = False
        self._passed: set[_Line] = set()
        """Refused in earlier rounds that did not come to the end of their topics: the next tries those behind them."""

    def stop(self) -> None:
        """End after one more round."""
        self._stopping = True

    async def run(self) -> None:
        """Publish until stopped."""
        failures = 0
        while True:
            last = self._stopping
            try:
                failures = failures + 1 if await self._round() else 0
            except StoreError as error:
                logger.warning("outbox not read: %s", error)
                failures += 1
            if last:
                return
            if failures:
                await asyncio.sleep(self._backoff.pause(failures))
            elif not self._stopping:
                await self._outbox.arrived(POLL_SECONDS)

    async def _round(self) -> bool:
        """Publish what there is; whether something could not be."""
        held_up = False
        while not held_up:
            claim = await self._outbox.claim(self._claim)
            if claim is None:
                return False
            held_up = await self._publish_all(claim)
        return True

    async def _publish_all(self, claim: Claim) -> bool:
        """Publish what was there when it was claimed; whether something could not be."""
        this = _Round(held_up=set(self._passed))
        waits, after = False, 0
        try:
            while True:
                # The next page belongs to us as long as this one does.
                this.stop_at = asyncio.get_running_loop().time() + self._claim.total_seconds() / 2
                found = await self._outbox.read(claim, after=after, besides=this.left_out())
                if not found:
                    break
                sent = await self._publish(found, this)
                if not await self._outbox.done(claim, sent, self._claim):
                    return False  # another relay has them by now
                left = [one for one in found if one.id not in set(sent)]
                this.held_up |= {_line(one) for one in left}
                waits, after = waits or bool(left), found[-1].id
        finally:
            await self._outbox.done(claim, [], timedelta(0))
        left_out = set(this.left_out())
        self._passed = {line for line in self._passed | this.refused if line[0] in left_out}
        return waits

    async def _publish(self, found: Sequence[Waiting], this: _Round) -> list[int]:
        """Those that the broker has confirmed."""
        lines: dict[_Line, list[Waiting]] = {}
        for one in found:
            lines.setdefault(_line(one), []).append(one)
        sent: list[int] = []
        free = [line for key, line in lines.items() if key not in this.held_up]
        await asyncio.gather(*(self._publish_line(line, this, sent) for line in free))
        return sent

    async def _publish_line(self, line: Sequence[Waiting], this: _Round, sent: list[int]) -> None:
        """One after the other: only so is a message that failed not overtaken by the next of its key."""
        for one in line:
            if asyncio.get_running_loop().time() > this.stop_at:
                return
            try:
                await self._send(one)
            except (PublishError, EventTooLargeError, _DamagedRowError) as error:
                # No bug of ours, and nothing is lost: it stays where it is.
                logger.error("event %s of the outbox waits: %s", one.message.event_id, error)
                this.refused.add(_line(one))
                return
            sent.append(one.id)

    async def _send(self, one: Waiting) -> None:
        if one.fault:
            raise _DamagedRowError(one)
        await self._publisher.send_message(one.message)


class _DamagedRowError(Exception):
    def __init__(self, one: Waiting) -> None:
        super().__init__(one)
        self.one = one

    def __str__(self) -> str:
        return (
            f"row {self.one.id} of the outbox is damaged, and what else has its Kafka key waits with it: "
            f"{self.one.fault}; fix the row, or delete it"
        )


_Line: TypeAlias = tuple[str, bytes | int]
"""What keeps its order: a topic and a Kafka key; a message without one is alone."""


def _line(one: Waiting) -> _Line:
    return one.message.topic, one.id if one.message.key is None else one.message.key


@dataclass
class _Round:
    """What one claim has come to so far."""

    held_up: set[_Line]
    """Whatever of it comes later must wait."""
    refused: set[_Line] = field(default_factory=set)
    """Tried in this round, in vain."""
    stop_at: float = 0.0
    """When to begin with no further message of the page."""

    def left_out(self) -> list[str]:
        """Topics of which no more is tried."""
        tried = Counter(topic for topic, _ in self.refused)
        return [topic for topic, times in tried.items() if times >= MOST_REFUSED]
