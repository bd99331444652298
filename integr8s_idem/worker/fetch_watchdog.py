"""Whether the client library still fetches (A5): it has tasks of its own that may die or wait for ever without a word.

Lag is no sign: it also grows while handlers are slow, while partitions rest, and behind open
transactions.  Nothing that came is no sign either: there may be nothing.  So when nothing has come for a
while the broker is asked, by the client's public calls alone, whether there is something behind where we stand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from aiokafka.errors import KafkaError

from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.kafka_protocols import Consumer, Partition

PATIENCE: Final = 60.0
"""Seconds in which nothing comes before the broker is asked; doubled with each client given up in a row."""

MOST_RENEWALS: Final = 3
"""Clients given up in a row, without one message between them, before the service gives up."""


class FetchWatchdog:
    """Looks at one consumer from time to time."""

    def __init__(self, patience: float, answer_seconds: float) -> None:
        """`patience`: seconds; `answer_seconds`: longest wait for one answer of a broker."""
        self._patience = patience
        self._answer_seconds = answer_seconds
        self._quiet_since = asyncio.get_running_loop().time()
        self._standing: dict[Partition, int] = {}
        """Where partitions stood at the last look, of those with messages behind that."""
        self._unanswered = False
        self.fetched = False
        """Whether this consumer has ever brought a message."""

    def stir(self, *, fetched: bool = False) -> None:
        """Something has happened that explains a silence, or ends it."""
        self._quiet_since = asyncio.get_running_loop().time()
        self.fetched = self.fetched or fetched

    async def doubt(self, consumer: Consumer, awake: Collection[Partition]) -> str:
        """Why this consumer is to be given up; empty: no reason.

        Two looks in a row must agree, since a client may also be busy with what it does not hand out:
        aborted transactions and their markers.

        Args:
            awake: Partitions that are ours and do not rest.
        """
        if not awake:
            self.stir()
        silent = asyncio.get_running_loop().time() - self._quiet_since
        if silent < self._patience:
            self._standing, self._unanswered = {}, False
            return ""
        looks = await asyncio.gather(*(self._look(consumer, partition) for partition in awake))
        known = {partition: look for partition, look in zip(awake, looks, strict=True) if look is not None}
        behind = {partition: position for partition, (position, end) in known.items() if end > position}
        stuck = [partition for partition, position in behind.items() if self._standing.get(partition) == position]
        unanswered, self._standing, self._unanswered = self._unanswered, behind, not known
        if stuck:
            first = stuck[0]
            return (
                f"nothing has come for {silent:.0f} s, though {first.topic}[{first.partition}] has messages "
                f"from {behind[first]} to {known[first][1]}"
            )
        if unanswered and not known:
            return f"nothing has come for {silent:.0f} s, and none of {len(awake)} partitions can be asked about"
        return ""

    async def _look(self, consumer: Consumer, partition: Partition) -> tuple[int, int] | None:
        """Where we stand, and where its committed messages end; `None`: nobody says."""
        try:
            position = await bounded(consumer.position(partition), self._answer_seconds)
            ends = await bounded(consumer.end_offsets([partition]), self._answer_seconds)
        except (KafkaError, OSError, TimeoutError):
            return None
        return position, ends[partition]
