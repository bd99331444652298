"""The errors of this library.

IdempotencyError
├── KeyReusedError              one key, two payloads: a bug in the producer or in the key
├── InProgressError             another worker is doing this work; its outcome is unknown   (retryable)
│   ├── IdempotencyConflictError    the same, after the longest wait
│   └── ScheduledError              an attempt failed, and the next one is not due yet
├── PreviouslyFailedError       this work was given up earlier; its record blocks it
├── DiscardedError              a rule discarded this work earlier; its record blocks it
├── ServiceStoppedError         a rule stops the service because of an error of a handler
├── MemberFencedError           another worker has joined the consumer group with the same id
├── LeaseLostError              the reservation was taken over, or may have been            (retryable)
├── HandlerTimeoutError         a handler ran longer than its service allows                (retryable)
├── HandlerCancelledError       a handler raised CancelledError without being cancelled      (retryable)
├── HandlerExitError            a handler called sys.exit(), or raised a BaseException      (retryable)
├── PartialFailureError         raised by batch handlers: some events failed
├── TransactionAbortedError     the database rolled a transaction back (deadlock, conflict) (retryable)
├── RetryAfter                  raised by handlers: a retry can succeed after a delay       (retryable)
│   └── OutcomeUnknownError     a reconcile function cannot tell what an earlier attempt did
├── PermanentError              raised by handlers: a retry cannot succeed
│   ├── CrashedTooOftenError    as many runs as attempts are allowed ended without an outcome
│   └── StepInterruptedError    an at-most-once step was started and its outcome is unknown
├── InvalidKeyError             no key can be made of the input
├── ResultDroppedError          the work is done; its result was too large to keep
├── ResultDecodeError           a stored result does not match the expected type
├── EventError
│   ├── UndecodableEventError   a message that is not a valid event of a known type
│   ├── EventTooLargeError      an event larger than the settings allow
│   └── PublishError            the broker did not confirm an event                         (retryable)
├── StoreError
│   ├── StoreUnavailableError   no answer; the state of the reservation is unknown          (retryable)
│   │   └── ResultNotStoredError    the work is done, but its record could not be written
│   ├── StoreConfigurationError     the store refuses requests: credentials, permissions, settings
│   └── CorruptRecordError      a record that cannot be read; never treated as absent
├── BrokerUnavailableError      no answer to a request about topics or dead letters         (retryable)
├── SettingsError               all mistakes in the settings
└── ApplicationError            the application is inconsistent

The annotated attributes of an error are its arguments, and `_message` returns its text.  Each error has a section in
docs/reference/errors.md, which `integr8s-idem errors NAME` prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from inspect import get_annotations
from typing import ClassVar, TypeVar, cast, dataclass_transform

from integr8s_idem._util.durations import length_of
from integr8s_idem._util.longest_duration import limited


def _seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"


def _sentence(reason: str) -> str:
    """Return `reason` with exactly one mark at its end."""
    return reason if reason.endswith(("?", "!")) else reason.rstrip(".") + "."


class IdempotencyError(Exception):
    """Base class of all errors of this library; it does not include exceptions of handlers."""

    retryable = False
    """Whether the same work can succeed if it is requested again later."""

    @property
    def read_more(self) -> str:
        """A command that prints the explanation of this error; it works wherever the package is installed."""
        package = __name__.partition(".")[0]
        # For an internal subclass, or one defined by an application, print the explanation of its base class.
        known = next(
            kind
            for kind in type(self).__mro__
            if kind.__module__.partition(".")[0] == package and "_is_internal" not in vars(kind)
        )
        return f"Read more: integr8s-idem errors {known.__name__}"

    _is_internal: ClassVar[bool]
    """Set in subclasses that are not public, and have no explanation of their own."""

    _fields: ClassVar[tuple[str, ...]] = ()
    """The names of the arguments, in order; empty for an error whose arguments are its message."""

    def __init__(self, *args: object, **named: object) -> None:
        values = _bound(type(self), args, named)
        # `args` holds all arguments, so that errors can be pickled and copied.
        super().__init__(*values)
        for name, value in zip(self._fields, values, strict=False):
            setattr(self, name, value)

    def _message(self) -> str:
        """Return what is wrong and what to do; empty for an error whose arguments are its message."""
        return ""

    def __str__(self) -> str:
        message = self._message()
        return f"{message} {self.read_more}" if message else super().__str__()


def _bound(kind: type[IdempotencyError], args: tuple[object, ...], named: Mapping[str, object]) -> tuple[object, ...]:
    """Return the value of each field of `kind`, or `args` if it has no fields.

    Raises:
        TypeError: The arguments do not match the fields.
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
    """Class decorator that makes the annotated attributes of an error class its arguments."""
    kind._fields = (*kind._fields, *get_annotations(kind))
    return kind


@_with_fields
class KeyReusedError(IdempotencyError):
    """The key was used with a different payload, so its result does not apply to this one."""

    key: str
    stored: bytes
    offered: bytes

    def _message(self) -> str:
        return (
            f"{self.key} was used before with another payload (fingerprint {self.stored.hex()}, "
            f"now {self.offered.hex()}): the work was not done. Give each payload its own id, "
            f'or set [idempotency] on_key_reused = "run".'
        )


@_with_fields
class InProgressError(IdempotencyError):
    """Another worker holds the key and its outcome is not known yet: do not acknowledge the delivery."""

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
    """Another worker was still doing this work when the longest wait ended."""

    waited: timedelta

    def _message(self) -> str:
        return (
            f"{self.key} is still being worked on by {self.owner or 'another worker'} (attempt {self.attempt}) after a "
            f"wait of {_seconds(self.waited)}; its lease ends in {_seconds(self.retry_after)}. Ask again then, or wait "
            f"longer."
        )


@_with_fields
class ScheduledError(InProgressError):
    """An attempt failed, and the next one is scheduled for later: do not acknowledge the delivery."""

    def _message(self) -> str:
        return (
            f"{self.key} failed at attempt {self.attempt}, and its next attempt is scheduled in "
            f"{_seconds(self.retry_after)}. Ask again then."
        )


@_with_fields
class PreviouslyFailedError(IdempotencyError):
    """The work was given up earlier, and its FAILED record blocks it until the record expires."""

    key: str
    attempt: int
    error: str

    def _message(self) -> str:
        return (
            f"{self.key} was given up after attempt {self.attempt}: {self.error}. "
            "To try again, replay it as a new generation, or delete its record."
        )


@_with_fields
class DiscardedError(IdempotencyError):
    """An earlier run failed with an error that a rule discards: the work is settled, and has no result."""

    label: str
    attempt: int
    error: str

    def _message(self) -> str:
        return f"{self.label} was discarded after attempt {self.attempt}: {_sentence(self.error)}"


@_with_fields
class ServiceStoppedError(IdempotencyError):
    """A handler failed with an error that stops the service, by a rule of the handler, its router or the settings."""

    label: str
    handler: str
    rule: str
    reason: str

    def _message(self) -> str:
        return (
            f"handler {self.handler} failed at {self.label}: {_sentence(self.reason)} The rule {self.rule} stops the "
            "service. The event is not settled: remove the cause, and start the service again."
        )


@_with_fields
class MemberFencedError(IdempotencyError):
    """Another worker has joined the consumer group with the same `group_instance_id`."""

    group: str
    instance_id: str

    def _message(self) -> str:
        return (
            f"another worker has joined the consumer group {self.group} with the id {self.instance_id}, and has the "
            "partitions of this one. Two running workers must not share an id: check [kafka] group_instance_id, and "
            "how many workers run on this host."
        )


@_with_fields
class LeaseLostError(IdempotencyError):
    """The reservation ended before the work was finished.

    If the handler had started, some of its side effects may have happened.  No result was stored.
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
                f"{lost}: the store refused to renew it. An operator ended its lease (integr8s-idem keys release), or "
                "another worker took over after this process stalled. No result was stored. "
                "integr8s-idem keys explain shows the current owner."
            )
        after = f", and {self.owner} took over" if self.owner else " and could not be renewed in time"
        return (
            f"{lost}: its lease of {_seconds(self.lease)} ended before the work was finished{after}. No result was "
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
            f"Raise handler_timeout_seconds of its service, or make the handler faster."
        )


@_with_fields
class HandlerCancelledError(IdempotencyError):
    """A handler raised `CancelledError`, but its task was not cancelled; or it cancelled its own task."""

    retryable = True

    handler: str
    own_task: bool = False

    def _message(self) -> str:
        if self.own_task:
            return (
                f"handler {self.handler} cancelled its own task at each attempt. For a timeout of its own, use "
                f"asyncio.timeout(), which raises TimeoutError."
            )
        return (
            f"handler {self.handler} raised CancelledError, but was not cancelled: it awaited a task or future that "
            f"was cancelled elsewhere. Catch the error around that await."
        )


@_with_fields
class HandlerExitError(IdempotencyError):
    """A handler called `sys.exit()`, or raised another error that is not an `Exception`.

    It would have ended the process or the service while other deliveries were being handled.
    """

    retryable = True

    handler: str
    raised: str = ""
    """The class and the text of the error; empty for `sys.exit()`."""

    def _message(self) -> str:
        done = f"raised an error that is not an Exception ({self.raised})" if self.raised else "called sys.exit()"
        return (
            f"handler {self.handler} {done}. This counts as a failure, and the process keeps running. "
            f"Raise an {'Exception' if self.raised else 'error'} instead."
        )


@_with_fields
class PartialFailureError(IdempotencyError):
    """Raised by a batch handler if some of its events failed and the others succeeded."""

    failures: Mapping[int, Exception]
    """By the index of the event in the batch."""
    results: Sequence[object] | None = None
    """One result per event, in order; `None` if there are no results."""

    def __init__(
        self, failures: Mapping[int, Exception], results: Sequence[object] | Iterator[object] | None = None
    ) -> None:
        """
        Args:
            failures: By the index of the event in the batch.
            results: One result per event, in order; `None` if there are no results.

        Raises:
            TypeError: `failures` is not a mapping.
        """
        if not isinstance(failures, Mapping):
            raise TypeError(f"failures must map indexes to errors, as {{0: error}}, not {type(failures).__name__}")
        super().__init__(failures, list(results) if isinstance(results, Iterator) else results)

    def _message(self) -> str:
        errors = "; ".join(f"{at}: {type(error).__name__}: {error}" for at, error in sorted(self.failures.items()))
        return f"{len(self.failures)} events of a batch failed: {errors[:500]}."


@_with_fields
class TransactionAbortedError(IdempotencyError):
    """The database rolled back a transaction that contains an outcome: a serialization conflict or a deadlock.

    Nothing was committed.  A retry of the whole transaction can succeed; it does not count as a failed run.
    """

    retryable = True

    label: str
    reason: str

    def _message(self) -> str:
        return f"the transaction of {self.label} was rolled back: {_sentence(self.reason)}"


class RetryAfter(IdempotencyError):  # noqa: N818  # named after the HTTP header
    """Raise this from a handler if a retry can succeed after a delay: the event is not retried earlier."""

    retryable = True

    _fields = ("delay", "reason")
    delay: timedelta
    reason: str

    def __init__(self, delay: timedelta | float, reason: str = "") -> None:
        """
        Args:
            delay: Minimum time until the next attempt, as a `timedelta` or in seconds; a negative one is 0,
                and one of more than a century is a century, as in stores.
            reason: Why the attempt failed, for logs and dead letters.

        Raises:
            ApplicationError: `delay` is not a duration, or `reason` is not a string.
        """
        length, name, given = length_of(delay), type(self).__name__, cast("object", reason)
        if length is None:
            raise ApplicationError(
                f"{name} needs a delay, as in {name}(60) or {name}(timedelta(minutes=1)), not {delay!r}"
            )
        if not isinstance(given, str):
            raise ApplicationError(f"the reason of {name} is {given!r}, but must be a string")
        super().__init__(limited(length), reason)

    def _message(self) -> str:
        why = f": {_sentence(self.reason)}" if self.reason else "."
        return f"the handler asks for a retry after {_seconds(self.delay)}{why}"


class OutcomeUnknownError(RetryAfter):
    """A reconcile function answered `Unknown`: nobody knows yet whether an earlier attempt has had its effect."""

    def _message(self) -> str:
        why = f": {_sentence(self.reason)}" if self.reason else "."
        return f"the outcome of an earlier attempt is unknown; it is asked for again after {_seconds(self.delay)}{why}"


class PermanentError(IdempotencyError):
    """Raise this from a handler if a retry cannot succeed: the event goes to the dead-letter topic at once."""


@_with_fields
class CrashedTooOftenError(PermanentError):
    """As many runs as attempts are allowed ended without an outcome."""

    attempts: int

    def _message(self) -> str:
        return f"{self.attempts} runs ended without an outcome: the process crashed, stalled or was killed each time."


@_with_fields
class StepInterruptedError(PermanentError):
    """An earlier run reserved this `at_most_once` step and its side effect may have happened: it does not run again."""

    step: str
    key: str
    reason: str

    def _message(self) -> str:
        return (
            f"step {self.step} of {self.key} was reserved by an earlier run, and its side effect may have happened: "
            f"{_sentence(self.reason)} The step is at_most_once and does not run again. Check whether the side effect "
            f"happened; a replay runs the step again."
        )


@_with_fields
class InvalidKeyError(IdempotencyError, ValueError):
    """No key can be made of the input: it is empty, not a string, or names a field that does not exist."""

    reason: str

    def _message(self) -> str:
        return f"no key can be made: {_sentence(self.reason)}"


@_with_fields
class ResultDroppedError(IdempotencyError):
    """The work is done, but its result was too large or could not be encoded, so it cannot be returned again."""

    key: str

    def _message(self) -> str:
        return (
            f"{self.key} is done, but its result was dropped: larger than [idempotency] max_result_size_bytes, "
            f"or not representable as JSON. Return a smaller result, such as a reference."
        )


@_with_fields
class ResultDecodeError(IdempotencyError):
    """The stored result does not match the expected type; the work itself is done."""

    key: str
    expected: str
    reason: str

    def _message(self) -> str:
        return (
            f"the stored result of {self.key} does not match {self.expected}: {self.reason}. The work is "
            "done; read the record itself, or use a return type that accepts older results."
        )


class EventError(IdempotencyError):
    """Base class of errors about incoming and outgoing events."""


@_with_fields
class UndecodableEventError(EventError):
    """A message is not a valid event of a known type; `reason` is from a closed set, suitable as a metric label."""

    reason: str
    detail: str

    def _message(self) -> str:
        return f"{self.reason}: {self.detail}."


@_with_fields
class EventTooLargeError(EventError, PermanentError):
    """An event is larger than the settings allow; it was not published."""

    topic: str
    size: int
    limit: int

    def _message(self) -> str:
        return (
            f"an event of {self.size} bytes for topic {self.topic} exceeds [kafka] max_event_bytes = {self.limit}. "
            f"Publish a reference instead, or raise the limit together with message.max.bytes of the broker."
        )


@_with_fields
class PublishError(EventError):
    """The broker did not confirm an event in time: it may have arrived, unless there was no connection."""

    retryable = True

    topic: str
    reason: str
    may_have_arrived: bool = True

    def _message(self) -> str:
        if not self.may_have_arrived:
            return (
                f"an event for topic {self.topic} was not sent, because there was no connection to a broker: "
                f"{_sentence(self.reason)} Check that the brokers are running ([kafka] bootstrap_servers), and publish "
                f"it again."
            )
        return (
            f"topic {self.topic} did not confirm an event: {self.reason}. It may have arrived; publishing "
            f"it again is safe because its id stays the same."
        )


class StoreError(IdempotencyError):
    """Base class of errors of the store."""


@_with_fields
class StoreUnavailableError(StoreError):
    """The store gave no usable answer.  The key may or may not be reserved; the handler did not run."""

    retryable = True

    operation: str
    reason: str
    code: str = "store-unavailable"
    """The diagnostic code, as in docs/reference/doctor.md."""

    def _message(self) -> str:
        return f"the store did not answer {self.operation}: {_sentence(self.reason)} integr8s-idem doctor examines it."


class ResultNotStoredError(StoreUnavailableError):
    """The work is done, but its completion could not be written: another worker may do it again."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__("complete", reason)
        self.args = (key, reason)
        self.key = key

    def _message(self) -> str:
        return (
            f"{self.key} is done, but its completion could not be stored: {self.reason}. The work may be done "
            f"again once its lease ends."
        )


@_with_fields
class StoreConfigurationError(StoreError):
    """The store refuses requests for a permanent reason: credentials, permissions, settings."""

    operation: str
    reason: str
    code: str = "store-refused"
    """The diagnostic code, as in docs/reference/doctor.md."""

    def _message(self) -> str:
        return f"the store refuses {self.operation}: {_sentence(self.reason)}"


@_with_fields
class CorruptRecordError(StoreError):
    """A record cannot be read: it is damaged, or was written by another program or a newer version."""

    key: str
    reason: str

    def _message(self) -> str:
        return (
            f"the record of {self.key} cannot be read: {self.reason}. The work was not done. Inspect the "
            f"record, and delete it once you know whether the work is done."
        )


@_with_fields
class BrokerUnavailableError(IdempotencyError):
    """The brokers gave no usable answer about their topics or the contents of dead-letter topics."""

    retryable = True

    servers: str
    """The value of `kafka.bootstrap_servers`."""
    reason: str

    def _message(self) -> str:
        return (
            f"no answer from {self.servers}: {_sentence(self.reason)} Check that the brokers are running; "
            f"integr8s-idem doctor checks the settings in [kafka]."
        )


@dataclass(frozen=True, slots=True)
class SettingsMistake:
    """One mistake: the path of the setting (`services.billing.concurrency`), and what to do about it."""

    path: str
    message: str


@_with_fields
class SettingsError(IdempotencyError):
    """All mistakes in the settings."""

    source: str
    mistakes: tuple[SettingsMistake, ...]

    def __init__(self, source: str, mistakes: Sequence[SettingsMistake]) -> None:
        super().__init__(source, tuple(mistakes))

    def __str__(self) -> str:
        count = len(self.mistakes)
        lines = [f"{self.source}: {count} mistake{'' if count == 1 else 's'}"]
        # A path longer than its column shifts only its own message.
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
    """The application is inconsistent: for example an unknown service, or a handler that cannot be called."""

    reason: str
    is_missing: bool = False
    """Whether the error is a valid name of something that does not exist."""

    def _message(self) -> str:
        return _sentence(self.reason)
