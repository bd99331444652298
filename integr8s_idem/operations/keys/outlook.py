"""What would happen to the next delivery of some work, by the policies of its service.  Pure."""

from __future__ import annotations

from datetime import timedelta

from integr8s_idem.config import IdempotencyConfig, OnFailure, OnInProgress, OnKeyReused
from integr8s_idem.operations.keys.standing import Lease, Standing
from integr8s_idem.records import Corrupt, IdempotencyRecord, IdempotencyStatus

_IN_PROGRESS = {
    OnInProgress.WAIT: "it would wait until that run has an outcome; a worker keeps its offset uncommitted",
    OnInProgress.RAISE: "it would be refused with InProgressError; a worker tries it again after a pause",
    OnInProgress.SKIP: "a worker would acknowledge it without handling it (on_in_progress = skip): if the owner dies, "
    "the event is lost",
}


def next_delivery(
    found: IdempotencyRecord | Corrupt | None, config: IdempotencyConfig, offered: bytes | None = None
) -> str:
    """One sentence.

    Args:
        found: The record; `None` if there is none.
        config: Of the service whose record it is.
        offered: Fingerprint of the delivery's payload, if that is known.
    """
    if found is None:
        return f"it would be handled, as attempt 1 of at most {config.max_attempts}{_blocks(config)}"
    if isinstance(found, Corrupt):
        return "it would not be handled: CorruptRecordError, and a worker dead-letters it (corrupt_record)"
    if offered is not None and found.fingerprint is not None and offered != found.fingerprint:
        return _key_reused(config)
    standing = Standing(found)
    if found.status is IdempotencyStatus.COMPLETED:
        return _completed(standing)
    if found.status is IdempotencyStatus.FAILED:
        return (
            "it would not be handled: PreviouslyFailedError, and a worker dead-letters it again (previously_failed), "
            f"{_until(standing)}. A replay of its dead letter is handled, as the next generation"
        )
    return _processing(standing, config)


def _blocks(config: IdempotencyConfig) -> str:
    return "; a failure gives it up at once (on_failure = block)" if config.on_failure is OnFailure.BLOCK else ""


def _key_reused(config: IdempotencyConfig) -> str:
    if config.on_key_reused is OnKeyReused.RUN:
        return "its payload is another one than the record's: it would be handled unguarded (on_key_reused = run)"
    return (
        "it would not be handled: its payload is another one than the record's: KeyReusedError, and a worker "
        "dead-letters it (key_reused)"
    )


def _completed(standing: Standing) -> str:
    record = standing.record
    if record.result_dropped:
        what = "acknowledged as a duplicate; whoever wants the result gets ResultDroppedError"
    elif record.result is None:
        what = "acknowledged as a duplicate; its result was not kept"
    else:
        what = "answered with the stored result"
    return f"it would not be handled, but {what}, {_until(standing)}"


def _until(standing: Standing) -> str:
    if standing.record.expires_at is None:
        return "as long as the record is there"
    return f"for another {span(standing.record.expires_at - standing.now)}"


def _processing(standing: Standing, config: IdempotencyConfig) -> str:
    attempt = standing.record.attempt + 1
    if standing.lease is Lease.HELD:
        left = span(standing.lease_left)
        return (
            f"{_IN_PROGRESS[config.on_in_progress]}. If the owner is dead, attempt {attempt} takes over when the lease "
            f"ends, in {left}"
        )
    if standing.lease is Lease.LAPSED and attempt > config.max_attempts:
        return (
            f"it would not be handled: {attempt - 1} runs have ended without a word, and max_attempts is "
            f"{config.max_attempts}: CrashedTooOftenError, FAILED, and a worker dead-letters it"
        )
    how = "taken over and handled" if standing.lease is Lease.LAPSED else "handled again"
    last = f"; if that fails, it is given up (max_attempts = {config.max_attempts})"
    return f"it would be {how}, as attempt {attempt}{last if attempt >= config.max_attempts else _blocks(config)}"


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
