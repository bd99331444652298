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

The annotated attributes of each are its arguments, and `_message` makes the sentence.  Each has a section in
docs/reference/errors.md, which `integr8s-idem errors NAME` prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import get_annotations
from typing import ClassVar, TypeVar, dataclass_transform


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

    _fields: ClassVar[tuple[str, ...]] = ()
    """The names of its arguments, in their order; empty for an error whose arguments are its message."""

    def __init__(self, *args: object, **named: object) -> None:
        values = _bound(type(self), args, named)
        # The arguments are in `args`, so that every error survives pickling and copying.
        super().__init__(*values)
        for name, value in zip(self._fields, values, strict=False):
            setattr(self, name, value)

    def _message(self) -> str:
        """What is wrong and what to do; empty for an error whose arguments are its message."""
        return ""

    def __str__(self) -> str:
        message = self._message()
        return f"{message} {self.read_more}" if message else super().__str__()


def _bound(kind: type[IdempotencyError], args: tuple[object, ...], named: Mapping[str, object]) -> tuple[object, ...]:
    """The value of each field of `kind`; `args` if it has none.

    Raises:
        TypeError: They do not fit.
    """
    names = kind._fields
    if not names and not named:
        return args
    values = {name: getattr(kind, name) for name in names if hasattr(kind, name)} | dict(zip(names, args, strict=False))
    if len(args) > len(names) or named.keys() & set(names[: len(args)]) or not {*values, *named} == {*names}:
        raise TypeError(f"{kind.__name__} takes ({', '.join(names)}), not {(*args, *named)}")
    values |= named
    return tuple(values[name] for name in names)


K = TypeVar("K", bound=type[IdempotencyError])


@dataclass_transform(eq_default=False)
def _with_fields(kind: K) -> K:
    """Make the annotated attributes of a class of errors its arguments."""
    kind._fields = (*kind._fields, *get_annotations(kind))
    return kind


@_with_fields
class KeyReusedError(IdempotencyError):
    """The key is known with another payload; the stored result is not an answer to this one."""

    key: str
    stored: bytes
    offered: bytes

    def _message(self) -> str:
        return (
            f"{self.key} was used before with another payload (fingerprint {self.stored.hex()}, "
            f"now {self.offered.hex()}): the work was not done. Give each payload an id of its own, "
            f'or set [idempotency] on_key_reused = "run".'
        )


@_with_fields
class InProgressError(IdempotencyError):
    """Somebody holds the key and its outcome is not known yet: do not acknowledge."""

    retryable = True

    key: str
    attempt: int
    retry_after: timedelta
    owner: str

    def _message(self) -> str:
        return (
            f"{self.key} is being worked on by {self.owner or 'another worker'} (attempt {self.attempt}); "
            f"its lease ends in {_seconds(self.retry_after)}. Ask again then."
        )


@_with_fields
class IdempotencyConflictError(InProgressError):
    """Somebody else was still at it when the longest wait was over."""

    waited: timedelta

    def _message(self) -> str:
        return (
            f"{self.key} is still being worked on by {self.owner or 'another worker'} (attempt {self.attempt}) after a "
            f"wait of {_seconds(self.waited)}; its lease ends in {_seconds(self.retry_after)}. Ask again then, or wait "
            f"longer."
        )


@_with_fields
class PreviouslyFailedError(IdempotencyError):
    """The work was given up earlier and its FAILED record blocks it until its ttl ends."""

    key: str
    attempt: int
    error: str

    def _message(self) -> str:
        return (
            f"{self.key} was given up after attempt {self.attempt}: {self.error}. "
            "To try again, replay it as a new generation, or delete its record."
        )


@_with_fields
class LeaseLostError(IdempotencyError):
    """The reservation ended before the work did.

    If the handler had started, some of its effects may have happened; no result was stored.
    """

    retryable = True

    key: str
    attempt: int
    lease: timedelta
    scope: str
    owner: str = ""
    withdrawn: bool = False
    late: bool = False

    def _message(self) -> str:
        lost = f"lost the reservation of {self.key} (attempt {self.attempt}, service {self.scope})"
        if self.late:
            return (
                f"{lost}: check_lease() found too little of its lease of {_seconds(self.lease)} left. The process "
                "stalled, or its event loop was blocked. Retry with the same key; raise [idempotency] "
                f"processing_timeout_seconds if this happens often."
            )
        if self.withdrawn:
            return (
                f"{lost}: at a renewal the store held it as ours no more. An operator ended its lease (integr8s-idem "
                "keys release), or another worker took over after a stall of this process. No result was "
                f"stored. integr8s-idem keys explain says who has it now."
            )
        after = f", and {self.owner} took over" if self.owner else " and could not be renewed in time"
        return (
            f"{lost}: its lease of {_seconds(self.lease)} ended before the work did{after}. No result was "
            "stored. Raise [idempotency] processing_timeout_seconds, or split the handler into steps."
        )


@_with_fields
class HandlerTimeoutError(IdempotencyError):
    """A handler ran longer than `handler_timeout_seconds` and was cancelled."""

    retryable = True

    handler: str
    limit: timedelta

    def _message(self) -> str:
        return (
            f"handler {self.handler} ran longer than {_seconds(self.limit)} and was cancelled. "
            f"Raise handler_timeout_seconds of its service, or make it faster."
        )


@_with_fields
class HandlerCancelledError(IdempotencyError):
    """A handler ended with a `CancelledError` of its own making: its task was not cancelled."""

    retryable = True

    handler: str

    def _message(self) -> str:
        return (
            f"handler {self.handler} raised CancelledError though nobody cancelled it: it awaited something that "
            f"was cancelled elsewhere. Catch it there."
        )


@_with_fields
class HandlerExitError(IdempotencyError):
    """A handler called `sys.exit()`, which would have ended the process with other deliveries under way."""

    retryable = True

    handler: str

    def _message(self) -> str:
        return (
            f"handler {self.handler} called sys.exit(): taken for a failure, the process goes on. "
            f"Raise an error instead."
        )


@_with_fields
class PartialFailureError(IdempotencyError):
    """Raised by a batch handler: some of its events have failed, and the others are done."""

    failures: Mapping[int, Exception]
    """By the index of the event in the batch."""
    results: Sequence[object] | None = None
    """One for each event, in their order, if there are any."""

    def __init__(
        self, failures: Mapping[int, Exception], results: Sequence[object] | Iterator[object] | None = None
    ) -> None:
        """
        Args:
            failures: By the index of the event in the batch.
            results: One for each event, in their order, if there are any.

        Raises:
            TypeError: `failures` is not a mapping.
        """
        if not isinstance(failures, Mapping):
            raise TypeError(f"failures are named by their places, as in {{0: error}}, not by {type(failures).__name__}")
        super().__init__(failures, list(results) if isinstance(results, Iterator) else results)

    def _message(self) -> str:
        errors = "; ".join(f"{at}: {type(error).__name__}: {error}" for at, error in sorted(self.failures.items()))
        return f"{len(self.failures)} events of a batch have failed: {errors[:500]}."


@_with_fields
class TransactionAbortedError(IdempotencyError):
    """The database gave up a transaction that holds an outcome: a serialization conflict or a deadlock.

    Nothing of it was kept.  Tried again as a whole it can succeed, and no run of the work has failed.
    """

    retryable = True

    label: str
    reason: str

    def _message(self) -> str:
        return f"the transaction of {self.label} was rolled back: {_sentence(self.reason)}"


class PermanentError(IdempotencyError):
    """Raise it from a handler when trying again cannot help: no retry, dead-letter topic at once."""


@_with_fields
class CrashedTooOftenError(PermanentError):
    """Earlier runs ended without a word, as often as attempts are allowed."""

    attempts: int

    def _message(self) -> str:
        return f"{self.attempts} runs ended without a word: the process crashed, stalled or was killed each time."


@_with_fields
class StepInterruptedError(PermanentError):
    """An `at_most_once` step of an earlier run was begun, and may have had its effect: it is not done again."""

    step: str
    key: str
    reason: str

    def _message(self) -> str:
        return (
            f"step {self.step} of {self.key} was begun by an earlier run and may have had its effect: "
            f"{_sentence(self.reason)} Being at_most_once it is not done again. Find out whether it happened; a replay "
            f"does it anew."
        )


@_with_fields
class InvalidKeyError(IdempotencyError, ValueError):
    """Nothing usable to make a key of: empty, not a string, or a field that does not exist."""

    reason: str

    def _message(self) -> str:
        return f"no key can be made: {_sentence(self.reason)}"


@_with_fields
class ResultDroppedError(IdempotencyError):
    """The work is done, and its result was too large or could not be written: there is nothing to replay."""

    key: str

    def _message(self) -> str:
        return (
            f"{self.key} is done, but its result was dropped: larger than [idempotency] max_result_size_bytes, "
            f"or nothing that JSON can hold. Return a smaller one, for example a reference."
        )


@_with_fields
class ResultDecodeError(IdempotencyError):
    """The stored result does not fit the type asked for; the work itself is done."""

    key: str
    expected: str
    reason: str

    def _message(self) -> str:
        return (
            f"the stored result of {self.key} does not fit {self.expected}: {self.reason}. The work is "
            "done; read the record itself, or give the function a return type that older results fit."
        )


class EventError(IdempotencyError):
    """Base of errors about events on their way in or out."""


@_with_fields
class UndecodableEventError(EventError):
    """A message that is no event we know; `reason` is one of a closed set, fit for a metric label."""

    reason: str
    detail: str

    def _message(self) -> str:
        return f"{self.reason}: {self.detail}."


@_with_fields
class EventTooLargeError(EventError, PermanentError):
    """An event is larger than the settings allow; it did not leave."""

    topic: str
    size: int
    limit: int

    def _message(self) -> str:
        return (
            f"an event of {self.size} bytes for topic {self.topic} exceeds [kafka] max_event_bytes = {self.limit}. "
            f"Publish a reference instead, or raise it together with the broker's message.max.bytes."
        )


@_with_fields
class PublishError(EventError):
    """The broker did not confirm an event in time: it may or may not have arrived."""

    retryable = True

    topic: str
    reason: str

    def _message(self) -> str:
        return (
            f"topic {self.topic} did not confirm an event: {self.reason}. It may have arrived; publishing "
            f"it again is safe, its id stays the same."
        )


class StoreError(IdempotencyError):
    """Base of errors of the store."""


@_with_fields
class StoreUnavailableError(StoreError):
    """No usable answer. The key may or may not be reserved; nothing was handled on its account."""

    retryable = True

    operation: str
    reason: str
    code: str = "store-unavailable"
    """What is wrong, for machines, as in docs/reference/doctor.md."""

    def _message(self) -> str:
        return f"the store did not answer {self.operation}: {_sentence(self.reason)}"


class ResultNotStoredError(StoreUnavailableError):
    """The work was done, but its completion could not be written: another worker may do it again."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__("complete", reason)
        self.args = (key, reason)
        self.key = key

    def _message(self) -> str:
        return (
            f"{self.key} was done, but its completion could not be stored: {self.reason}. It may be done "
            f"again once its lease ends."
        )


@_with_fields
class StoreConfigurationError(StoreError):
    """The store refuses requests for a reason that does not pass: credentials, permissions, settings."""

    operation: str
    reason: str
    code: str = "store-refused"
    """What is wrong, for machines, as in docs/reference/doctor.md."""

    def _message(self) -> str:
        return f"the store refuses {self.operation}: {_sentence(self.reason)}"


@_with_fields
class CorruptRecordError(StoreError):
    """A record that cannot be read: damaged, or written by another program."""

    key: str
    reason: str

    def _message(self) -> str:
        return (
            f"the record of {self.key} cannot be read: {self.reason}. The work was not done. Look at the "
            f"record and delete it once you know whether the work is done."
        )


@_with_fields
class BrokerUnavailableError(IdempotencyError):
    """No usable answer when we asked the brokers about their topics, or what dead-letter topics hold."""

    retryable = True

    servers: str
    """As `kafka.bootstrap_servers` names them."""
    reason: str

    def _message(self) -> str:
        return (
            f"no answer from {self.servers}: {_sentence(self.reason)} See that they run, and what [kafka] says of "
            f"them: integr8s-idem doctor."
        )


@dataclass(frozen=True, slots=True)
class SettingsMistake:
    """One mistake: where it stands (`services.billing.concurrency`) and what to do about it."""

    path: str
    message: str


@_with_fields
class SettingsError(IdempotencyError):
    """Every mistake in the settings, at once."""

    source: str
    mistakes: tuple[SettingsMistake, ...]

    def __init__(self, source: str, mistakes: Sequence[SettingsMistake]) -> None:
        super().__init__(source, tuple(mistakes))

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


@_with_fields
class ApplicationError(IdempotencyError):
    """What was asked to run does not fit together: an unknown service, a handler nobody can call."""

    reason: str
    is_missing: bool = False
    """What was named is well formed, and there is no such thing."""

    def _message(self) -> str:
        return _sentence(self.reason)
