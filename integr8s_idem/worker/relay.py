"""The relay: publishes what transactions have left in the outbox.

In the order of the rows for each Kafka key; one that cannot be published now holds up its own key only.  A relay
that dies between the broker's confirmation and the row's end lets the next one publish it again, with its id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Final, TypeAlias

from integr8s_idem.errors import EventTooLargeError, PublishError, StoreError
from integr8s_idem.stores.outbox import Claim, Outbox, Waiting
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.retries import Backoff

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
"""Time between two looks for what other processes have left; one's own is published at once."""

MOST_HELD_UP: Final = 500
"""Messages that cannot be published, after which a round looks no further."""


class Relay:
    """Publishes from one outbox.  Any number of them may work on it, in any number of processes."""

    def __init__(self, outbox: Outbox, publisher: EventPublisher, *, claim_seconds: float) -> None:
        """`claim_seconds`: for how long buckets are claimed; more than twice the publisher's timeout."""
        self._outbox = outbox
        self._publisher = publisher
        self._claim = timedelta(seconds=claim_seconds)
        self._backoff = Backoff(initial=0.2, longest=5.0)
        self._stopping = False

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
        held: dict[int, _Line] = {}
        try:
            while len(held) < MOST_HELD_UP:
                # The next page belongs to us as long as this one does.
                stop_at = asyncio.get_running_loop().time() + self._claim.total_seconds() / 2
                found = await self._outbox.read(claim, besides=list(held))
                if not found:
                    break
                sent = await self._publish(found, set(held.values()), stop_at)
                if not await self._outbox.done(claim, sent, self._claim):
                    return False  # another relay has them by now
                held |= {one.id: _line(one) for one in found if one.id not in set(sent)}
        finally:
            await self._outbox.done(claim, [], timedelta(0))
        return bool(held)

    async def _publish(self, found: Sequence[Waiting], held_up: set[_Line], stop_at: float) -> list[int]:
        """Those that the broker has confirmed."""
        lines: dict[_Line, list[Waiting]] = {}
        for one in found:
            lines.setdefault(_line(one), []).append(one)
        sent: list[int] = []
        free = [line for key, line in lines.items() if key not in held_up]
        await asyncio.gather(*(self._publish_line(line, stop_at, sent) for line in free))
        return sent

    async def _publish_line(self, line: Sequence[Waiting], stop_at: float, sent: list[int]) -> None:
        """One after the other: only so is a message that failed not overtaken by the next of its key."""
        for one in line:
            if asyncio.get_running_loop().time() > stop_at:
                return
            try:
                await self._publisher.send_message(one.message)
            except (PublishError, EventTooLargeError) as error:
                # No bug of ours, and nothing is lost: it stays where it is.
                logger.error("event %s of the outbox waits: %s", one.message.event_id, error)
                return
            sent.append(one.id)


_Line: TypeAlias = tuple[str, bytes | int]
"""What keeps its order: a topic and a Kafka key; a message without one is alone."""


def _line(one: Waiting) -> _Line:
    return one.message.topic, one.id if one.message.key is None else one.message.key
