"""Detect a Kafka client that no longer fetches (A5): its background tasks may die or block without an error.

Lag does not show this: it also grows while handlers are slow, while partitions are paused, and after open transactions.
An idle topic does not show it either.  If no message was received for a while, the watchdog asks the brokers, through
the client's public API, whether there are messages after the current position.

Numbers such as R1 and A5 refer to docs/explanation/worker.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from aiokafka.errors import KafkaError

from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.kafka_protocols import Consumer, Partition

PATIENCE: Final = 60.0
"""Seconds without messages after which the brokers are asked; doubled with each consecutive replacement."""

MOST_RENEWALS: Final = 3
"""Maximum consecutive replacements of a client without a single message, before the service fails."""


class FetchWatchdog:
    """Checks one consumer periodically."""

    def __init__(self, patience: float, answer_seconds: float) -> None:
        """Start the timer.

        Args:
            patience: Seconds without messages after which the brokers are asked.
            answer_seconds: Timeout of a request to a broker.
        """
        self._patience = patience
        self._answer_seconds = answer_seconds
        self._quiet_since = asyncio.get_running_loop().time()
        self._last_positions: dict[Partition, int] = {}
        """Positions at the last check, of partitions that had messages after them."""
        self._unanswered = False
        self.fetched = False
        """Whether this consumer has received a message."""

    def reset(self, *, fetched: bool = False) -> None:
        """Restart the timer, after messages or an event that explains their absence."""
        self._quiet_since = asyncio.get_running_loop().time()
        self.fetched = self.fetched or fetched

    async def diagnose(self, consumer: Consumer, partitions: Collection[Partition]) -> str:
        """Return why this consumer is to be replaced, or an empty string.

        Two consecutive checks must agree, since a client may also be processing records that it does not return:
        aborted transactions and their markers.

        Args:
            partitions: Assigned partitions that are not paused.
        """
        if not partitions:
            self.reset()
        silent = asyncio.get_running_loop().time() - self._quiet_since
        if silent < self._patience:
            self._last_positions, self._unanswered = {}, False
            return ""
        answers = await asyncio.gather(*(self._position_and_end(consumer, partition) for partition in partitions))
        known = {partition: answer for partition, answer in zip(partitions, answers, strict=True) if answer is not None}
        behind = {partition: position for partition, (position, end) in known.items() if end > position}
        stuck = [partition for partition, position in behind.items() if self._last_positions.get(partition) == position]
        unanswered, self._last_positions, self._unanswered = self._unanswered, behind, not known
        if stuck:
            first = stuck[0]
            return (
                f"no messages received for {silent:.0f} s, although {first.topic}[{first.partition}] has messages "
                f"from {behind[first]} to {known[first][1]}"
            )
        if unanswered and not known:
            return (
                f"no messages received for {silent:.0f} s, and the brokers do not return the end offset of any of "
                f"{len(partitions)} partitions"
            )
        return ""

    async def _position_and_end(self, consumer: Consumer, partition: Partition) -> tuple[int, int] | None:
        """Return the position and the end of committed messages, or `None` if they cannot be read."""
        try:
            position = await bounded(consumer.position(partition), self._answer_seconds)
            ends = await bounded(consumer.end_offsets([partition]), self._answer_seconds)
        except (KafkaError, OSError, TimeoutError):
            return None
        return position, ends[partition]
