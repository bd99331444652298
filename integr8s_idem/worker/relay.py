"""Publish messages from the outbox.

Messages of one Kafka key are published in the order of their rows.  A message that cannot be published blocks only its
own key.  If many keys of a topic are blocked, a round skips the rest of the topic, so that other topics do not wait for
its timeouts; the next round continues after the blocked keys.  If a relay dies after the broker's confirmation and
before the row is deleted, the next relay publishes the message again, with the same event id.
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
from integr8s_idem.stores.outbox import Claim, OutboxStore, Waiting
from integr8s_idem.telemetry import SILENT, Observer, Signal
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.publisher import EventPublisher

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 1.0
"""Interval of checks for messages of other processes; those of the same process are published immediately."""

MOST_REFUSED: Final = 100
"""Blocked Kafka keys of a topic after which a round skips the rest of the topic."""


class Relay:
    """Publishes messages from an outbox.  Several relays may share an outbox, in several processes."""

    def __init__(
        self, outbox: OutboxStore, publisher: EventPublisher, *, claim_seconds: float, observer: Observer = SILENT
    ) -> None:
        """`claim_seconds` is the duration of a claim: more than twice the publisher's timeout."""
        self._outbox = outbox
        self._publisher = publisher
        self._observer = observer
        self._claim = timedelta(seconds=claim_seconds)
        self.published = 0
        """How many messages the broker has confirmed."""
        self.failures = 0
        """How many times a message could not be published."""
        self.store_error = ""
        """The class of the database's error in the last round; empty if it answered."""
        self._backoff = Backoff(initial=0.2, longest=5.0)
        self._stopping = False
        self._skipped: set[_OrderingKey] = set()
        """Keys that were blocked in earlier rounds which skipped the rest of a topic; the next round skips them."""

    def stop(self) -> None:
        """Stop after one more round."""
        self._stopping = True

    async def run(self) -> None:
        """Publish until stopped."""
        if not self._outbox.has_hints:
            await self._run()
            return
        hearing = asyncio.get_running_loop().create_task(self._outbox.hear_hints())
        try:
            await self._run()
        finally:
            hearing.cancel()
            await asyncio.wait({hearing})

    async def drain(self) -> bool:
        """Publish until the outbox is empty, and return whether it is: `False` if a message could not be published.

        Messages that another relay is publishing are waited for; those of one that has died, until its claim ends.

        Raises:
            StoreError: The database does not answer.
        """
        while True:
            if await self._round():
                return False
            if self._stopping or not await self._outbox.count():
                return not self._stopping
            await self._outbox.arrived(POLL_SECONDS)

    async def _run(self) -> None:
        failures = 0
        while True:
            last = self._stopping
            try:
                failures = failures + 1 if await self._round() else 0
                self.store_error = ""
            except StoreError as error:
                logger.warning("outbox not read: %s", error)
                self.store_error = type(error).__name__
                failures += 1
            if last:
                return
            if failures:
                await asyncio.sleep(self._backoff.pause(failures))
            elif not self._stopping:
                await self._outbox.arrived(POLL_SECONDS)

    async def _round(self) -> bool:
        """Publish all messages that can be claimed, and return whether some could not be published."""
        has_blocked = False
        while not has_blocked:
            claim = await self._outbox.claim(self._claim)
            if claim is None:
                return False
            has_blocked = await self._publish_all(claim)
        return True

    async def _publish_all(self, claim: Claim) -> bool:
        """Publish the claimed messages, and return whether some could not be published."""
        this = _Round(blocked=set(self._skipped))
        has_blocked, after = False, 0
        try:
            while True:
                # `done` extends the claim for the next page.
                this.stop_at = asyncio.get_running_loop().time() + self._claim.total_seconds() / 2
                page = await self._outbox.read(claim, after=after, besides=this.skipped_topics())
                if not page:
                    break
                sent = await self._publish(page, this)
                if not await self._outbox.done(claim, sent, self._claim):
                    return False  # the claim has expired, and another relay has them
                unsent = [row for row in page if row.id not in set(sent)]
                this.blocked |= {_ordering_key(row) for row in unsent}
                has_blocked, after = has_blocked or bool(unsent), page[-1].id
        finally:
            await self._outbox.done(claim, [], timedelta(0))
        skipped_topics = set(this.skipped_topics())
        self._skipped = {key for key in self._skipped | this.refused if key[0] in skipped_topics}
        return has_blocked

    async def _publish(self, page: Sequence[Waiting], this: _Round) -> list[int]:
        """Publish a page, and return the ids of the rows that the broker has confirmed."""
        by_key: dict[_OrderingKey, list[Waiting]] = {}
        for row in page:
            by_key.setdefault(_ordering_key(row), []).append(row)
        sent: list[int] = []
        unblocked = [rows for key, rows in by_key.items() if key not in this.blocked]
        await asyncio.gather(*(self._publish_in_order(rows, this, sent) for rows in unblocked))
        return sent

    async def _publish_in_order(self, rows: Sequence[Waiting], this: _Round, sent: list[int]) -> None:
        """Publish rows of one key one after another, so that none overtakes one that failed."""
        for row in rows:
            if asyncio.get_running_loop().time() > this.stop_at:
                return
            try:
                await self._send(row)
            except (PublishError, EventTooLargeError, _DamagedRowError) as error:
                logger.error("event %s stays in the outbox: %s", row.message.event_id, error)
                self.failures += 1
                self._observer.count(Signal.OUTBOX_FAILURE, row.message.event_type)
                this.refused.add(_ordering_key(row))
                return
            sent.append(row.id)
            self.published += 1

    async def _send(self, row: Waiting) -> None:
        if row.fault:
            raise _DamagedRowError(row)
        await self._publisher.publish_message(row.message)


class _DamagedRowError(Exception):
    def __init__(self, row: Waiting) -> None:
        super().__init__(row)
        self.row = row

    def __str__(self) -> str:
        return (
            f"row {self.row.id} of the outbox is damaged and blocks all messages with its Kafka key: "
            f"{self.row.fault}; fix the row, or delete it"
        )


_OrderingKey: TypeAlias = tuple[str, bytes | int]
"""Topic and Kafka key of messages that keep their order; for a message without a key, its topic and row id."""


def _ordering_key(row: Waiting) -> _OrderingKey:
    return row.message.topic, row.id if row.message.key is None else row.message.key


@dataclass
class _Round:
    """State of the work on one claim."""

    blocked: set[_OrderingKey]
    """Keys whose further messages must wait."""
    refused: set[_OrderingKey] = field(default_factory=set)
    """Keys of messages that could not be published in this round."""
    stop_at: float = 0.0
    """When to stop publishing messages of the page, by the event loop's clock."""

    def skipped_topics(self) -> list[str]:
        """Return the topics of which no more messages are published in this round."""
        refused = Counter(topic for topic, _ in self.refused)
        return [topic for topic, count in refused.items() if count >= MOST_REFUSED]
