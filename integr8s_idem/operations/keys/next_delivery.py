"""What would happen to the next delivery of some work, by the policies of its service.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, OnKeyReused
from integr8s_idem.engine.work import SUSPECT_AFTER, is_crash_limit_reached
from integr8s_idem.operations.keys.record_state import Lease, Standing
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus

_ACKNOWLEDGES: Final = (
    "a worker would acknowledge it without handling it (on_in_progress = skip): if the owner dies, the event is lost"
)


@dataclass(frozen=True, slots=True)
class Outlook:
    """Says it for the records of one service."""

    config: IdempotencyConfig
    """Of that service."""
    by_worker: bool = True
    """Whether a worker delivers the work, as events come; else somebody calls for it by a key of their own."""
    isolates: bool = False
    """Whether it runs work alone that may have crashed its process."""

    def of(
        self,
        found: IdempotencyRecord | Corrupt | None,
        offered: bytes | None = None,
        replayed: tuple[int, IdempotencyRecord | Corrupt] | None = None,
    ) -> str:
        """One sentence.

        Args:
            found: The record; `None` if there is none.
            offered: Fingerprint of the delivery's payload, if that is known.
            replayed: The newest later generation of the same work, with its record, if there is one.
        """
        if found is None:
            return f"it would be handled, as attempt 1 of at most {self.config.max_attempts}{self._blocks()}"
        if isinstance(found, Corrupt):
            return self._refused("CorruptRecordError", "corrupt_record")
        if offered is not None and found.fingerprint is not None and offered != found.fingerprint:
            return self._key_reused()
        standing = Standing(found)
        if found.status is IdempotencyStatus.COMPLETED:
            return _completed(standing)
        if found.status is IdempotencyStatus.FAILED:
            return self._failed(standing, replayed)
        return self._processing(standing)

    def _refused(self, error: str, reason: str) -> str:
        letter = f", and a worker dead-letters it ({reason})" if self.by_worker else ""
        return f"it would not be handled: {error}{letter}"

    def _blocks(self) -> str:
        block = self.config.on_failure is OnFailure.BLOCK
        return "; a failure gives it up at once (on_failure = block)" if block else ""

    def _key_reused(self) -> str:
        told = "its payload is another one than the record's: "
        if self.config.on_key_reused is OnKeyReused.RUN:
            return told + "it would be handled unguarded (on_key_reused = run)"
        return told + self._refused("KeyReusedError", "key_reused")

    def _failed(self, standing: Standing, replayed: tuple[int, IdempotencyRecord | Corrupt] | None) -> str:
        again = "a replay of its dead letter is handled" if self.by_worker else "without its record it is done again"
        if replayed is not None:
            again = _replay(*replayed)
        return f"{self._refused('PreviouslyFailedError', 'previously_failed')}, {_until(standing)}; {again}"

    def _processing(self, standing: Standing) -> str:
        record, attempt = standing.record, standing.record.attempt + 1
        if standing.lease is Lease.HELD:
            left = span(standing.lease_left)
            dead = f"if the owner is dead, attempt {attempt} takes over when the lease ends, in {left}"
            return f"{self._while_held()}; {dead}"
        has_lapsed = standing.lease is Lease.LAPSED
        lapsed, lapsed_alone = record.lapsed + has_lapsed, record.lapsed_alone + (has_lapsed and record.alone)
        isolates, most = self.isolates and self.config.max_attempts > 1, self.config.max_attempts
        if has_lapsed and is_crash_limit_reached(attempt, lapsed, lapsed_alone, most, isolates=isolates):
            alone = f", {lapsed_alone} of them alone in their process" if isolates else ""
            runs = f"{lapsed} attempts have lapsed{alone}, and max_attempts is {most}"
            return f"{self._refused('CrashedTooOftenError', 'handler_failed')}: {runs}"
        how = "taken over and handled" if has_lapsed else "handled again"
        alone = ", alone in its process" if isolates and lapsed >= SUSPECT_AFTER else ""
        counted = attempt - (lapsed - lapsed_alone if isolates else 0)
        last = f"; if that fails, it is given up (max_attempts = {most})"
        return f"it would be {how}, as attempt {attempt}{alone}{last if counted >= most else self._blocks()}"

    def _while_held(self) -> str:
        if self.config.on_in_progress is OnInProgress.WAIT:
            limit = f" at most {self.config.wait_timeout_seconds:g} s" if not self.by_worker else ""
            offset = "; a worker keeps its offset uncommitted meanwhile" if self.by_worker else ""
            return f"it would wait{limit} for the outcome of that run{offset}"
        if self.config.on_in_progress is OnInProgress.RAISE:
            again = ", and a worker tries it again after a pause" if self.by_worker else ""
            return f"it would be refused: InProgressError{again}"
        return _ACKNOWLEDGES if self.by_worker else "it would be left undone (on_in_progress = skip)"


def _completed(standing: Standing) -> str:
    record = standing.record
    if record.result_dropped:
        what = "known as a duplicate; whoever wants the result gets ResultDroppedError"
    elif record.result is None:
        what = "known as a duplicate; its result was not kept"
    else:
        what = "answered with the stored result"
    return f"it would not be handled, but {what}, {_until(standing)}"


def _replay(generation: int, found: IdempotencyRecord | Corrupt) -> str:
    told = f"its replay, generation {generation},"
    if isinstance(found, Corrupt):
        return f"{told} has a record that cannot be read"
    if found.status is IdempotencyStatus.COMPLETED:
        return f"{told} is completed, and another replay of its dead letter would be left out"
    if found.status is IdempotencyStatus.FAILED:
        return f"{told} was given up as well: replay the dead letter of that one"
    return f"{told} is not settled yet"


def _until(standing: Standing) -> str:
    if standing.record.expires_at is None:
        return "as long as the record is there"
    return f"for another {span(standing.record.expires_at - standing.now)}"


def span(length: timedelta) -> str:
    """A length of time for people, in at most two units: `3 d 4 h`, `12 s`, `250 ms`."""
    seconds = abs(length.total_seconds())
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left, told = round(seconds), list[tuple[int, str]]()
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        number, left = divmod(left, size)
        if number or told:
            told.append((number, unit))
    return " ".join(f"{number} {unit}" for number, unit in told[:2] if number)
