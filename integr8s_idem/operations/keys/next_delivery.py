"""Predict what happens to the next delivery of an event, from its record and its service's policies.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, OnKeyReused
from integr8s_idem.engine.failure_policy import most_attempts
from integr8s_idem.engine.results import observed_place
from integr8s_idem.engine.work import SUSPECT_AFTER, is_crash_limit_reached
from integr8s_idem.errors import OutcomeUnknownError
from integr8s_idem.failures import FailureAction, FailureRule
from integr8s_idem.operations.keys.record_state import Lease, RecordState
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus, is_other_payload

_ACKNOWLEDGES: Final = (
    "a worker would acknowledge it without handling it (on_in_progress = skip); if the owner dies, the event is lost"
)


@dataclass(frozen=True, slots=True)
class NextDelivery:
    """Describes next deliveries for the records of one service."""

    config: IdempotencyConfig
    """The service's configuration."""
    by_worker: bool = True
    """Whether a worker delivers events; otherwise a caller passes its own key."""
    isolates: bool = False
    """Whether the worker runs events that may have crashed a process alone."""
    observes: bool = False
    """Whether the service runs all deliveries, and only counts duplicates."""
    reconciles: bool = False
    """Whether the handler is known to have a reconcile function."""
    rules: tuple[FailureRule, ...] | None = ()
    """The handler's rules for errors, before the default ones; `None` if they are unknown."""

    def describe(
        self,
        found: IdempotencyRecord | Corrupt | None,
        offered: bytes | None = None,
        replayed: tuple[int, IdempotencyRecord | Corrupt] | None = None,
    ) -> str:
        """Describe the next delivery in one sentence.

        Args:
            found: The record, or `None`.
            offered: Fingerprint of the delivery's payload, if known.
            replayed: The newest later generation of the same work and its record, if any.
        """
        if self.observes:
            return "would be handled: the service only observes (mode = observe)"
        if found is None:
            return f"would be handled, as attempt 1 of at most {self.config.max_attempts}{self._if_it_fails(1)}"
        if isinstance(found, Corrupt):
            return self._refused("CorruptRecordError", "corrupt_record")
        if is_other_payload(found.fingerprint, offered):
            return self._key_reused()
        state = RecordState(found)
        if found.status is IdempotencyStatus.COMPLETED:
            return _completed(state)
        if found.status is IdempotencyStatus.FAILED:
            return self._failed(state, replayed)
        return self._processing(state)

    def other_payloads(self) -> str:
        """Describe what happens to deliveries with the same key and another payload."""
        if self.observes:
            return "other payloads with this key are handled as well, and counted"
        if self.config.on_key_reused is OnKeyReused.RUN:
            return "other payloads with this key are handled unguarded"
        return "other payloads with this key are refused"

    def _refused(self, error: str, reason: str) -> str:
        dead_letter = f"; a worker would dead-letter it ({reason})" if self.by_worker else ""
        return f"would not be handled: {error}{dead_letter}"

    def _if_it_fails(self, attempt: int) -> str:
        """Describe what a failure of the attempt with this number means, as the end of a sentence."""
        limit, final = self.config.max_attempts, ""
        if self.config.on_failure is OnFailure.BLOCK:
            final = "on_failure = block"
        if attempt >= limit:
            final = f"max_attempts = {limit}"
        usual = f"; a failure would be final ({final})" if final else ""
        if self.rules is None:
            return usual and f"{usual}, unless a rule for the error says otherwise (to see the rules, use --app)"
        by_rule = ", ".join(_decision(rule, attempt, limit) for rule in self.rules)
        return f"{usual}; by its rules, {by_rule}" if by_rule else usual

    def _key_reused(self) -> str:
        mismatch = "the payload differs from that of the record: "
        if self.config.on_key_reused is OnKeyReused.RUN:
            return mismatch + "would be handled unguarded (on_key_reused = run)"
        return mismatch + self._refused("KeyReusedError", "key_reused")

    def _failed(self, state: RecordState, replayed: tuple[int, IdempotencyRecord | Corrupt] | None) -> str:
        again = "a replay of its dead letter is handled" if self.by_worker else "it runs again once the record is gone"
        if replayed is not None:
            again = _replay(*replayed)
        if replayed is None and self.reconciles:
            again += ", after its reconcile function has been asked"
        refused = self._refused("PreviouslyFailedError", "previously_failed")
        unknown = "; nobody could tell whether its effect has happened" if is_unknown(state.record.error) else ""
        return f"{refused}, {_until(state)}{unknown}; {again}"

    def _processing(self, state: RecordState) -> str:
        record, attempt = state.record, state.record.attempt + 1
        if state.lease is Lease.SCHEDULED:
            offset = "; a worker waits for that, or publishes a copy to a retry topic" if self.by_worker else ""
            return f"would wait: attempt {attempt} is scheduled in {format_duration(state.lease_left)}{offset}"
        if state.lease is Lease.HELD:
            left = format_duration(state.lease_left)
            dead = f"if the owner is dead, attempt {attempt} takes over when the lease ends in {left}"
            return f"{self._while_held()}; {dead}"
        has_lapsed = state.lease is Lease.LAPSED
        lapsed, lapsed_alone = record.lapsed + has_lapsed, record.lapsed_alone + (has_lapsed and record.alone)
        max_attempts = self.config.max_attempts
        isolates = self.isolates and max_attempts > 1
        if has_lapsed and is_crash_limit_reached(
            attempt,
            lapsed,
            lapsed_alone,
            max_attempts,
            isolates=isolates,
            most_attempts=most_attempts(self.rules or ()),
        ):
            alone = f", {lapsed_alone} of them alone in their process" if isolates else ""
            runs = f"{lapsed} attempts have lapsed{alone}, and max_attempts is {max_attempts}"
            return f"{self._refused('CrashedTooOftenError', 'handler_failed')}: {runs}"
        action = "taken over and handled" if has_lapsed else "handled again"
        alone = ", alone in its process" if isolates and lapsed >= SUSPECT_AFTER else ""
        counted = attempt - (lapsed - lapsed_alone if isolates else 0)
        asked = ", unless its reconcile function finds that an earlier attempt has had its effect"
        answered = asked if self.reconciles else ""
        return f"would be {action}, as attempt {attempt}{alone}{answered}{self._if_it_fails(counted)}"

    def _while_held(self) -> str:
        if self.config.on_in_progress is OnInProgress.WAIT:
            limit = f" at most {self.config.wait_timeout_seconds:g} s" if not self.by_worker else ""
            offset = "; a worker does not commit its offset meanwhile" if self.by_worker else ""
            return f"would wait{limit} for the outcome of the current run{offset}"
        if self.config.on_in_progress is OnInProgress.RAISE:
            again = "; a worker retries it after a delay" if self.by_worker else ""
            return f"would be refused: InProgressError{again}"
        return _ACKNOWLEDGES if self.by_worker else "would be skipped (on_in_progress = skip)"


def _decision(rule: FailureRule, attempt: int, max_attempts: int) -> str:
    """Describe what a rule decides if the attempt with this number fails with one of its errors."""
    errors, attempts = " or ".join(error.__qualname__ for error in rule.errors), rule.attempts or max_attempts
    match rule.action:
        case FailureAction.STOP:
            return f"{errors} stops the service"
        case FailureAction.DISCARD:
            return f"{errors} is discarded"
        case FailureAction.DEAD_LETTER:
            return f"{errors} is dead-lettered"
        case _ if rule.is_last(attempt, max_attempts):
            return f"{errors} is final (attempts = {attempts})"
        case _:
            after = f" after {format_duration(rule.delay)}" if rule.delay else ""
            return f"{errors} is retried{after}, at most {attempts} attempts"


def _completed(state: RecordState) -> str:
    record = state.record
    if state.discarded is not None:
        answer = "recognized as a duplicate of an event that was discarded"
    elif (place := observed_place(record.result)) is not None:
        answer = f"recognized as a duplicate of {place}, whose handling was only observed"
    elif record.result_dropped:
        answer = "recognized as a duplicate; requesting the result raises ResultDroppedError"
    elif record.result is None:
        answer = "recognized as a duplicate; its result was not stored"
    else:
        answer = "answered with the stored result"
    return f"would not be handled, but {answer}, {_until(state)}"


def is_unknown(error: str) -> bool:
    """Whether a record has failed with this error because no reconcile function knew the outcome of its attempts."""
    return error.startswith(f"{OutcomeUnknownError.__name__}:")


def _replay(generation: int, found: IdempotencyRecord | Corrupt) -> str:
    replay = f"its replay, generation {generation},"
    if isinstance(found, Corrupt):
        return f"{replay} has a corrupt record"
    if found.status is IdempotencyStatus.COMPLETED:
        return f"{replay} is completed, and another replay of its dead letter would be skipped"
    if found.status is IdempotencyStatus.FAILED:
        return f"{replay} failed as well: replay the dead letter of that generation"
    return f"{replay} is still in progress"


def _until(state: RecordState) -> str:
    if state.record.expires_at is None:
        return "as long as the record exists"
    return f"for another {format_duration(state.record.expires_at - state.now)}"


def format_duration(length: timedelta) -> str:
    """Format a duration in at most two units: `3 d 4 h`, `12 s`, `250 ms`."""
    seconds = abs(length.total_seconds())
    if seconds < 1:
        return f"{round(seconds * 1000)} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    left, parts = round(seconds), list[tuple[int, str]]()
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        number, left = divmod(left, size)
        if number or parts:
            parts.append((number, unit))
    return " ".join(f"{number} {unit}" for number, unit in parts[:2] if number)
