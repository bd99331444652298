"""Decide which replay headers a service honors.

Replay headers can make a handler run again, or prevent others from running.  They are honored only if the message is
signed, or if the settings allow unsigned replays.  If they are refused, the message is handled as if it had none.
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
from integr8s_idem.records import IdempotencyRecord, IdempotencyStatus, is_other_payload
from integr8s_idem.telemetry import Observer, Signal
from integr8s_idem.telemetry.log_fields import MessageSource, logging_with
from integr8s_idem.worker.dead_letters import REPLAY_SIGNATURE, claim_of, own_headers, replay_header
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.replay_signatures import ReplayClaim, event_hash, is_signed

logger = logging.getLogger(__name__)

LOG_INTERVAL: Final = 60.0
"""Minimum seconds between two log lines about replay headers, since any producer can cause them."""


@dataclass(frozen=True, slots=True)
class ReplayDecision:
    """What a service does about the replay headers of a message."""

    generation: int = 0
    only: str | None = None
    """The only handler to run; `None` for all."""
    is_for_others: bool = False
    """Whether the message is for another consumer group."""
    refused: str = ""
    """Why the headers are refused: the label `reason` of the metric."""
    unproven: ReplayClaim | None = None
    """A claim that is honored if the store confirms that the work failed."""
    event: bytes = b""
    """Required hash of the event's id; empty if any is accepted."""

    def fits(self, event_id: str) -> bool:
        """Whether the signature was made for the event with this id."""
        return not self.event or self.event == event_hash(event_id)


NO_REPLAY: Final = ReplayDecision()
"""Decision for a message without replay headers."""

OTHER_EVENT: Final = ReplayDecision(refused="other_event")


class ReplayPolicy:
    """Decides about replay headers for one consumer group."""

    def __init__(self, group: str, settings: ReplaySettings) -> None:
        self._group = group.encode("utf-8", "backslashreplace")
        self._keys = settings.keys
        self._unsigned = settings.unsigned_policy

    def judge(self, record: Record) -> ReplayDecision:
        """Return the decision about the replay headers of `record`.

        Raises:
            UndecodableEventError: Unsigned replays are trusted, and the generation is not a number from 0 to 999.
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
    """Whether `claim` is for the handler of `execution`, or for all handlers."""
    return not claim.handler or claim.handler == execution.handler.name.encode("utf-8", "backslashreplace")


async def follows_a_failure(execution: GuardedExecution, generation: int) -> bool:
    """Whether `generation` of this work replays a failed run, according to the store.

    It does if the previous generation is FAILED, with the same payload, and no older one is COMPLETED or PROCESSING.
    If `generation` has a record already, this was confirmed before.

    Raises:
        StoreError: The store is unavailable.
    """
    repository = execution.handler.manager.measured_repository
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
    return record.status is IdempotencyStatus.FAILED and not is_other_payload(record.fingerprint, fingerprint)


class ReplayReporter:
    """Counts and logs replays that were refused or are for another consumer group."""

    def __init__(self, service: str, observer: Observer) -> None:
        self._service = service
        self._observer = observer
        self._silent_until = float("-inf")
        self._unlogged = 0

    def refused(self, record: Record, reason: str) -> None:
        """Report that the replay headers of `record` are refused."""
        self._observer.count(Signal.REPLAY_REFUSED, reason=reason)
        self._log(record, logging.WARNING, f"its replay headers are refused ({reason}): handled as if it had none")

    def for_others(self, record: Record) -> None:
        """Report that `record` is skipped, as a replay for another consumer group."""
        self._observer.count(Signal.REPLAY_FOR_OTHERS)
        self._log(record, logging.INFO, "skipped: it is a replay for another consumer group")

    def _log(self, record: Record, level: int, what: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._silent_until:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} similar messages were not logged" if self._unlogged else ""
        self._silent_until, self._unlogged = now + LOG_INTERVAL, 0
        place = f"{record.topic}[{record.partition}]@{record.offset}"
        with logging_with(MessageSource(self._service, record)):
            logger.log(level, "%s: %s %s%s", self._service, place, what, more)
