"""Every error this library raises on purpose.

IdempotencyError
├── KeyReusedError              one key, two payloads: a bug in the producer or in the key
├── InProgressError             somebody is doing this work now; its outcome is not known   (retryable)
│   └── IdempotencyConflictError    the same, after a wait as long as was wanted
├── PreviouslyFailedError       this work was given up earlier; its record blocks it
├── LeaseLostError              our reservation was taken over, or might have been          (retryable)
├── HandlerTimeoutError         a handler ran longer than its service allows                (retryable)
├── HandlerCancelledError       a handler ended with a cancellation that nobody asked for   (retryable)
├── HandlerExitError            a handler called sys.exit()                                 (retryable)
├── PartialFailureError         raised by batch handlers: some of the events have failed
├── TransactionAbortedError     the database gave up a transaction: a deadlock, a conflict  (retryable)
├── PermanentError              raised by handlers: trying again cannot help
│   ├── CrashedTooOftenError    earlier runs ended without a word, as often as attempts are allowed
│   └── StepInterruptedError    a step that must not be done twice was begun, and how it ended is not known
├── InvalidKeyError             nothing usable to make a key of
├── ResultDroppedError          the work is done; its result was too large to keep
├── ResultDecodeError           a stored result does not fit the type asked for
├── EventError
│   ├── UndecodableEventError   a message that is no event we know
│   ├── EventTooLargeError      an event larger than the settings allow
│   └── PublishError            the broker did not confirm an event                         (retryable)
├── StoreError
│   ├── StoreUnavailableError   no answer; nothing is known about the reservation           (retryable)
│   │   └── ResultNotStoredError    the work is done, its record could not be written
│   ├── StoreConfigurationError     the store refuses us: credentials, permissions, settings
│   └── CorruptRecordError      a record that cannot be read; never taken for "absent"
├── BrokerUnavailableError      no answer when we asked the brokers about what they hold    (retryable)
├── SettingsError               every mistake in the settings, at once
└── ApplicationError            what was asked to run does not fit together

Fields travel in `args` and the sentence is made by `__str__`, so every error survives
pickling and copying.  Each has a section in docs/reference/errors.md, which `integr8s-idem errors NAME` prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def _sentence(reason: str) -> str:
    """`reason`, ending as a sentence does; drivers bring their own full stop or none."""
    return reason.rstrip(".") + "."


class IdempotencyError(Exception):
    """Base of all errors below; catching it never catches a bug in a handler."""

    retryable = False
    """Whether the same work, asked for again later, can succeed."""

    @property
    def read_more(self) -> str:
        """Where this error is explained: a command, which works wherever the package is installed."""
        package = __name__.partition(".")[0]
        # A subclass of the application's own is explained by the class of the library that it extends.
        known = next(kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] == package)
        return f"Read more: integr8s-idem errors {known.__name__}"


class KeyReusedError(IdempotencyError):
    """The key is known with another payload; the stored result is not an answer to this one."""

    def __init__(self, key: str, stored: bytes, offered: bytes) -> None:
        super().__init__(key, stored, offered)
        self.key = key
        self.stored = stored
        self.offered = offered

    def __str__(self) -> str:
        return (
            f"{self.key} was used before with another payload (fingerprint {self.stored.hex()}, "
            f"now {self.offered.hex()}): the work was not done. Give each payload an id of its own, "
            f'or set [idempotency] on_key_reused = "run". {self.read_more}'
        )


class InProgressError(IdempotencyError):
    """Somebody holds the key and its outcome is not known yet: do not acknowledge."""

    retryable = True

    def __init__(self, key: str, attempt: int, retry_after: timedelta, owner: str) -> None:
        super().__init__(key, attempt, retry_after, owner)
        self.key = key
        self.attempt = attempt
        self.retry_after = retry_after
        self.owner = owner

    def __str__(self) -> str:
        return (
            f"{self.key} is being worked on by {self.owner or 'another worker'} (attempt {self.attempt}); "
            f"its lease ends in {_seconds(self.retry_after)}. Ask again then. {self.read_more}"
        )


class IdempotencyConflictError(InProgressError):
    """Somebody else was still at it when the longest wait was over."""

    def __init__(self, key: str, attempt: int, retry_after: timedelta, owner: str, waited: timedelta) -> None:
        super().__init__(key, attempt, retry_after, owner)
        self.args = (*self.args, waited)
        self.waited = waited

    def __str__(self) -> str:
        return (
            f"{self.key} is still being worked on by {self.owner or 'another worker'} (attempt {self.attempt}) after a "
            f"wait of {_seconds(self.waited)}; its lease ends in {_seconds(self.retry_after)}. Ask again then, or wait "
            f"longer. {self.read_more}"
        )


class PreviouslyFailedError(IdempotencyError):
    """The work was given up earlier and its FAILED record blocks it until its ttl ends."""

    def __init__(self, key: str, attempt: int, error: str) -> None:
        super().__init__(key, attempt, error)
        self.key = key
        self.attempt = attempt
        self.error = error

    def __str__(self) -> str:
        return (
            f"{self.key} was given up after attempt {self.attempt}: {self.error}. "
            "To try again, replay it as a new generation, or delete its record. "
            f"{self.read_more}"
        )


class LeaseLostError(IdempotencyError):
    """The reservation ended before the work did.

    If the handler had started, some of its effects may have happened; no result was stored.
    """

    retryable = True

    def __init__(
        self,
        key: str,
        attempt: int,
        lease: timedelta,
        scope: str,
        owner: str = "",
        withdrawn: bool = False,
        late: bool = False,
    ) -> None:
        super().__init__(key, attempt, lease, scope, owner, withdrawn, late)
        self.key = key
        self.attempt = attempt
        self.lease = lease
        self.scope = scope
        self.owner = owner
        self.withdrawn = withdrawn
        self.late = late

    def __str__(self) -> str:
        lost = f"lost the reservation of {self.key} (attempt {self.attempt}, service {self.scope})"
        if self.late:
            return (
                f"{lost}: check_lease() found too little of its lease of {_seconds(self.lease)} left. The process "
                "stalled, or its event loop was blocked. Retry with the same key; raise [idempotency] "
                f"processing_timeout_seconds if this happens often. {self.read_more}"
            )
        if self.withdrawn:
            return (
                f"{lost}: at a renewal the store held it as ours no more. An operator ended its lease (integr8s-idem "
                "keys release), or another worker took over after a stall of this process. No result was "
                f"stored. integr8s-idem keys explain says who has it now. {self.read_more}"
            )
        after = f", and {self.owner} took over" if self.owner else " and could not be renewed in time"
        return (
            f"{lost}: its lease of {_seconds(self.lease)} ended before the work did{after}. No result was "
            "stored. Raise [idempotency] processing_timeout_seconds, or split the handler into steps. "
            f"{self.read_more}"
        )


class HandlerTimeoutError(IdempotencyError):
    """A handler ran longer than `handler_timeout_seconds` and was cancelled."""

    retryable = True

    def __init__(self, handler: str, limit: timedelta) -> None:
        super().__init__(handler, limit)
        self.handler = handler
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"handler {self.handler} ran longer than {_seconds(self.limit)} and was cancelled. "
            f"Raise handler_timeout_seconds of its service, or make it faster. {self.read_more}"
        )


class HandlerCancelledError(IdempotencyError):
    """A handler ended with a `CancelledError` of its own making: its task was not cancelled."""

    retryable = True

    def __init__(self, handler: str) -> None:
        super().__init__(handler)
        self.handler = handler

    def __str__(self) -> str:
        return (
            f"handler {self.handler} raised CancelledError though nobody cancelled it: it awaited something that "
            f"was cancelled elsewhere. Catch it there. {self.read_more}"
        )


class HandlerExitError(IdempotencyError):
    """A handler called `sys.exit()`, which would have ended the process with other deliveries under way."""

    retryable = True

    def __init__(self, handler: str) -> None:
        super().__init__(handler)
        self.handler = handler

    def __str__(self) -> str:
        return (
            f"handler {self.handler} called sys.exit(): taken for a failure, the process goes on. "
            f"Raise an error instead. {self.read_more}"
        )


class PartialFailureError(IdempotencyError):
    """Raised by a batch handler: some of its events have failed, and the others are done."""

    def __init__(
        self, failures: Mapping[int, Exception], results: Sequence[object] | Iterator[object] | None = None
    ) -> None:
        """Which events, and why.

        Args:
            failures: By the index of the event in the batch.
            results: One for each event, in their order, if there are any.

        Raises:
            TypeError: `failures` is no mapping.
        """
        if not isinstance(failures, Mapping):
            raise TypeError(f"failures are named by their places, as in {{0: error}}, not by {type(failures).__name__}")
        read = list(results) if isinstance(results, Iterator) else results
        super().__init__(failures, read)
        self.failures = failures
        self.results = read

    def __str__(self) -> str:
        told = "; ".join(f"{index}: {type(error).__name__}: {error}" for index, error in sorted(self.failures.items()))
        return f"{len(self.failures)} events of a batch have failed: {told[:500]}. {self.read_more}"


class TransactionAbortedError(IdempotencyError):
    """The database gave up a transaction that holds an outcome: a serialization conflict or a deadlock.

    Nothing of it was kept.  Tried again as a whole it can succeed, and no run of the work has failed.
    """

    retryable = True

    def __init__(self, label: str, reason: str) -> None:
        super().__init__(label, reason)
        self.label = label
        self.reason = reason

    def __str__(self) -> str:
        return f"the transaction of {self.label} was rolled back: {_sentence(self.reason)} {self.read_more}"


class PermanentError(IdempotencyError):
    """Raise it from a handler when trying again cannot help: no retry, dead-letter topic at once."""


class CrashedTooOftenError(PermanentError):
    """Earlier runs ended without a word, as often as attempts are allowed."""

    def __init__(self, attempts: int) -> None:
        super().__init__(attempts)
        self.attempts = attempts

    def __str__(self) -> str:
        return (
            f"{self.attempts} runs ended without a word: the process crashed, stalled or was killed each time. "
            f"{self.read_more}"
        )


class StepInterruptedError(PermanentError):
    """An `at_most_once` step of an earlier run was begun, and may have had its effect: it is not done again."""

    def __init__(self, step: str, key: str, reason: str) -> None:
        super().__init__(step, key, reason)
        self.step = step
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"step {self.step} of {self.key} was begun by an earlier run and may have had its effect: "
            f"{_sentence(self.reason)} Being at_most_once it is not done again. Find out whether it happened; a replay "
            f"does it anew. {self.read_more}"
        )


class InvalidKeyError(IdempotencyError, ValueError):
    """Nothing usable to make a key of: empty, not a string, or a field that does not exist."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"no key can be made: {_sentence(self.reason)} {self.read_more}"


class ResultDroppedError(IdempotencyError):
    """The work is done, and its result was too large or could not be written: there is nothing to replay."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"{self.key} is done, but its result was dropped: larger than [idempotency] max_result_size_bytes, "
            f"or nothing that JSON can hold. Return a smaller one, for example a reference. {self.read_more}"
        )


class ResultDecodeError(IdempotencyError):
    """The stored result does not fit the type asked for; the work itself is done."""

    def __init__(self, key: str, expected: str, reason: str) -> None:
        super().__init__(key, expected, reason)
        self.key = key
        self.expected = expected
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the stored result of {self.key} does not fit {self.expected}: {self.reason}. The work is "
            "done; read the record itself, or give the function a return type that older results fit. "
            f"{self.read_more}"
        )


class EventError(IdempotencyError):
    """Base of errors about events on their way in or out."""


class UndecodableEventError(EventError):
    """A message that is no event we know; `reason` is one of a closed set, fit for a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}. {self.read_more}"


class EventTooLargeError(EventError, PermanentError):
    """An event is larger than the settings allow; it did not leave."""

    def __init__(self, topic: str, size: int, limit: int) -> None:
        super().__init__(topic, size, limit)
        self.topic = topic
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"an event of {self.size} bytes for topic {self.topic} exceeds [kafka] max_event_bytes = {self.limit}. "
            f"Publish a reference instead, or raise it together with the broker's message.max.bytes. {self.read_more}"
        )


class PublishError(EventError):
    """The broker did not confirm an event in time: it may or may not have arrived."""

    retryable = True

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(topic, reason)
        self.topic = topic
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"topic {self.topic} did not confirm an event: {self.reason}. It may have arrived; publishing "
            f"it again is safe, its id stays the same. {self.read_more}"
        )


class StoreError(IdempotencyError):
    """Base of errors of the store."""


class StoreUnavailableError(StoreError):
    """No usable answer. The key may or may not be reserved; nothing was handled on its account."""

    retryable = True

    def __init__(self, operation: str, reason: str, code: str = "store-unavailable") -> None:
        """`code`: what is wrong, for machines, as in docs/reference/doctor.md."""
        super().__init__(operation, reason, code)
        self.operation = operation
        self.reason = reason
        self.code = code

    def __str__(self) -> str:
        return f"the store did not answer {self.operation}: {_sentence(self.reason)} {self.read_more}"


class ResultNotStoredError(StoreUnavailableError):
    """The work was done, but its completion could not be written: another worker may do it again."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__("complete", reason)
        self.args = (key, reason)
        self.key = key

    def __str__(self) -> str:
        return (
            f"{self.key} was done, but its completion could not be stored: {self.reason}. It may be done "
            f"again once its lease ends. {self.read_more}"
        )


class StoreConfigurationError(StoreError):
    """The store refuses us for a reason that waiting does not mend: credentials, permissions, settings."""

    def __init__(self, operation: str, reason: str, code: str = "store-refused") -> None:
        """`code`: what is wrong, for machines, as in docs/reference/doctor.md."""
        super().__init__(operation, reason, code)
        self.operation = operation
        self.reason = reason
        self.code = code

    def __str__(self) -> str:
        return f"the store refuses {self.operation}: {_sentence(self.reason)} {self.read_more}"


class CorruptRecordError(StoreError):
    """A record that cannot be read: damaged, or written by another program."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"the record of {self.key} cannot be read: {self.reason}. The work was not done. Look at the "
            f"record and delete it once you know whether the work is done. {self.read_more}"
        )


class BrokerUnavailableError(IdempotencyError):
    """No usable answer when we asked the brokers about their topics, or what dead-letter topics hold."""

    retryable = True

    def __init__(self, servers: str, reason: str) -> None:
        """`servers`: as `kafka.bootstrap_servers` names them."""
        super().__init__(servers, reason)
        self.servers = servers
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"no answer from {self.servers}: {_sentence(self.reason)} See that they run, and what [kafka] says of "
            f"them: integr8s-idem doctor. {self.read_more}"
        )


@dataclass(frozen=True, slots=True)
class SettingsMistake:
    """One mistake: where it stands (`services.billing.concurrency`) and what to do about it."""

    path: str
    message: str


class SettingsError(IdempotencyError):
    """Every mistake in the settings, at once."""

    def __init__(self, source: str, mistakes: Sequence[SettingsMistake]) -> None:
        super().__init__(source, mistakes)
        self.source = source
        self.mistakes = tuple(mistakes)

    def __str__(self) -> str:
        count = len(self.mistakes)
        lines = [f"{self.source}: {count} mistake{'' if count == 1 else 's'}"]
        # A path too long for its column pushes only its own message aside.
        paths = [len(mistake.path) for mistake in self.mistakes if not mistake.message.startswith("=")]
        width = min(max(paths, default=0), 40)
        lines += [_row(mistake, width) for mistake in self.mistakes]
        return "\n".join([*lines, self.read_more])


def _row(mistake: SettingsMistake, width: int) -> str:
    if mistake.message.startswith("="):
        text = f"  {mistake.path} {mistake.message}"
    else:
        text = f"  {mistake.path:<{width}}  {mistake.message}"
    return textwrap.fill(text, 110, subsequent_indent=" " * (width + 4), break_long_words=False, break_on_hyphens=False)


class ApplicationError(IdempotencyError):
    """What was asked to run does not fit together: an unknown service, a handler nobody can call."""

    def __init__(self, reason: str, is_missing: bool = False) -> None:
        """`is_missing`: what was named is well formed, and there is no such thing."""
        super().__init__(reason)
        self.reason = reason
        self.is_missing = is_missing

    def __str__(self) -> str:
        return f"{_sentence(self.reason)} {self.read_more}"
