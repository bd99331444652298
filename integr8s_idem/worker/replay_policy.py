"""Which replay headers a service honors.

A header may make a handler run again, or keep others from running.  So it counts only where its message is signed, or
where the settings say that it may do without.  Headers that are refused change nothing: the message is handled as if it
did not have them.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from integr8s_idem.config import ReplaySettings
from integr8s_idem.errors import CorruptRecordError, UndecodableEventError
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.keys import generation_key
from integr8s_idem.records import IdempotencyRecord, IdempotencyStatus
from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.worker.dead_letters import REPLAY_SIGNATURE, claim_of, own_headers, replay_header
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.replay_signatures import ReplayClaim, event_hash, is_signed

logger = logging.getLogger(__name__)

LOG_INTERVAL: Final = 60.0
"""Seconds between two log lines about replay headers: anybody who may publish can cause them."""


@dataclass(frozen=True, slots=True)
class ReplayDecision:
    """What the replay headers of one message come to."""

    generation: int = 0
    only: str | None = None
    """The one handler that is to run; `None` for all."""
    is_for_others: bool = False
    """Whether another consumer group is to handle it."""
    refused: str = ""
    """Why the headers are not honored: the label `reason` of the metric."""
    unproven: ReplayClaim | None = None
    """What is honored if the store says that it is a replay of failed work."""
    event: bytes = b""
    """What the id of the event must hash to; empty for any."""

    def fits(self, event_id: str) -> bool:
        """Whether the signature was made for the event with this id."""
        return not self.event or self.event == event_hash(event_id)


NO_REPLAY: Final = ReplayDecision()
"""Of a message without replay headers."""

OTHER_EVENT: Final = ReplayDecision(refused="other_event")


class ReplayPolicy:
    """Judges replay headers for one consumer group."""

    def __init__(self, group: str, settings: ReplaySettings) -> None:
        self._group = group.encode("utf-8", "backslashreplace")
        self._keys = settings.keys
        self._unsigned = settings.unsigned_policy

    def judge(self, record: Record) -> ReplayDecision:
        """What the replay headers of `record` come to.

        Raises:
            UndecodableEventError: Every producer is trusted, and the generation is no number from 0 to 999.
        """
        try:
            claim = claim_of(record)
        except UndecodableEventError:
            if self._unsigned == "trust":
                raise
            return ReplayDecision(refused="malformed")
        if claim is None:
            return NO_REPLAY
        signature = replay_header(record, REPLAY_SIGNATURE)
        if signature and is_signed(signature, claim, record.value, own_headers(record), self._keys):
            return self._honored(claim, claim.event)
        if self._unsigned == "trust":
            return self._honored(claim, b"")
        if self._unsigned == "failed_only" and claim.generation and claim.group in (b"", self._group):
            return ReplayDecision(unproven=claim)
        return ReplayDecision(refused="bad_signature" if signature else "unsigned")

    def _honored(self, claim: ReplayClaim, event: bytes) -> ReplayDecision:
        if claim.group and claim.group != self._group:
            return ReplayDecision(is_for_others=True)
        only = claim.handler.decode("utf-8", "backslashreplace") if claim.handler else None
        return ReplayDecision(claim.generation, only, event=event)


def asks_for(claim: ReplayClaim, execution: GuardedExecution) -> bool:
    """Whether `claim` names the handler of `execution`, or none."""
    return not claim.handler or claim.handler == execution.handler.name.encode("utf-8", "backslashreplace")


async def follows_a_failure(execution: GuardedExecution, generation: int) -> bool:
    """Whether `generation` of this work is the replay of a run that was given up, as far as the store knows.

    The generation before it is FAILED, with the same payload, and no older one is COMPLETED or PROCESSING.
    One that has a record was found to be so before.

    Raises:
        StoreError: The store gives no answer.
    """
    repository = execution.handler.manager.repository
    keys = [generation_key(execution.record_key, number) for number in range(generation + 1)]
    try:
        previous, same = await repository.get(keys[-2:])
        if same is not None:
            return True
        if previous is None or not _has_failed(previous, execution.work.fingerprint):
            return False
        older = await repository.get(keys[:-2]) if generation > 1 else []
    except CorruptRecordError:
        return False
    return all(record is None or record.status is IdempotencyStatus.FAILED for record in older)


def _has_failed(record: IdempotencyRecord, fingerprint: bytes | None) -> bool:
    is_same = fingerprint is None or record.fingerprint in (None, fingerprint)
    return record.status is IdempotencyStatus.FAILED and is_same


class ReplayReporter:
    """Counts and logs what became of replay headers that changed nothing here, or kept a message from this group."""

    def __init__(self, service: str, observer: Observer) -> None:
        self._service = service
        self._observer = observer
        self._silent_until = float("-inf")
        self._unlogged = 0

    def refused(self, record: Record, reason: str) -> None:
        """The headers of `record` are not honored."""
        self._observer.count(Signal.REPLAY_REFUSED, reason=reason)
        self._log(record, logging.WARNING, f"its replay headers are refused ({reason}): handled as if it had none")

    def for_others(self, record: Record) -> None:
        """`record` is passed by: it is a replay for another consumer group."""
        self._observer.count(Signal.REPLAY_FOR_OTHERS)
        self._log(record, logging.INFO, "passed by: it is a replay for another consumer group")

    def _log(self, record: Record, level: int, what: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._silent_until:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} more like it were not logged" if self._unlogged else ""
        self._silent_until, self._unlogged = now + LOG_INTERVAL, 0
        place = f"{record.topic}[{record.partition}]@{record.offset}"
        logger.log(level, "%s: %s %s%s", self._service, place, what, more)
