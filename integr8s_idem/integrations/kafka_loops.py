"""Code shared by the consumer loops in `aiokafka.py` and `confluent.py`.

A loop processes records one at a time.  It commits periodically, and never past a record that is not processed: if its
work fails, that record and the later ones of its partition are fetched again.  A record that another worker is
processing is waited for.  The library's own worker adds concurrency, delayed retries, dead letters and draining.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from integr8s_idem._util.committable_offsets import Placed
from integr8s_idem.codecs import header
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.engine.failure_policy import FailurePolicy
from integr8s_idem.engine.manager import IdempotencyManager, replayed_value
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.results import discarded_error, encode_result, refuse_generator
from integr8s_idem.engine.work import Discarded, Executed, HandlerFailed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    InvalidKeyError,
    ServiceStoppedError,
)
from integr8s_idem.failures import FailureAction, FailureRule, checked_rules
from integr8s_idem.functions.sync_bridge import is_async, named
from integr8s_idem.keys import EntryPoint, Key, given_text
from integr8s_idem.keys.field_sets import field_set_of_value
from integr8s_idem.keys.fingerprints import fingerprint, fingerprint_of_fields
from integr8s_idem.records import Completed
from integr8s_idem.telemetry import Signal

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 30.0
"""Seconds before a failed record is fetched again; the pause doubles after each failure up to the longest."""

COMMIT_INTERVAL: Final = timedelta(seconds=1)


class Record(Placed, Protocol):
    """A Kafka record."""

    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...


KeyOf: TypeAlias = Callable[[Any], str]
"""Returns the key of a record."""


def by_header(name: str) -> KeyOf:
    """Use a header that the producer sets once per event, so that events sent twice are detected as duplicates."""

    def key_of(record: Record) -> str:
        found = header(record.headers, name.lower())
        if not found:
            position = f"{record.topic}[{record.partition}]@{record.offset}"
            raise InvalidKeyError(f"{position} has no header {name} to make a key of")
        return found

    return key_of


def by_position(record: Record) -> str:
    """Use topic, partition and offset.  This detects redeliveries, but not events that a producer sends twice."""
    return f"{record.topic}:{record.partition}:{record.offset}"


def policy_of(failures: Iterable[FailureRule] | None) -> FailurePolicy | None:
    """Return the rules for errors of a loop; `None` if it has none, not even the default ones.

    Raises:
        ApplicationError: A rule has a pause of its own.
    """
    if failures is None:
        return None
    rules = checked_rules(failures)
    for rule in rules:
        has_pause = (rule.delay, rule.first_pause, rule.longest_pause) != (None, None, None) or not rule.jitter
        if has_pause:
            raise ApplicationError(
                f"the rule {rule} has a pause of its own, during which all partitions would wait, until the consumer "
                "is removed from its group. Write retry() with attempts only, or use the library's worker"
            )
    return FailurePolicy(rules)


def work_of(
    manager: IdempotencyManager,
    record: Record,
    key: KeyOf,
    ttl: timedelta | None,
    function: Callable[..., object],
    failures: FailurePolicy | None = None,
) -> Work:
    """Return the work of `record`, which `function` does.  The body of the record is its fingerprint."""
    checked = None if ttl is None else manager.checked_ttl(ttl)
    # Producers control the header: its value must not match a key of another entry point in the same scope.
    text = given_text(key(record))
    entry_key = Key.of_entry(EntryPoint.KAFKA_LOOP, *text.split(":"), name=text)
    fingerprint_ = _fingerprint_of(record.value)
    return Work(manager.space.key(entry_key), fingerprint_, checked, returns=function, failures=failures)


def _fingerprint_of(body: object) -> bytes | None:
    """Return the fingerprint of a body: bytes, or the serializable output of the consumer's own deserializer."""
    if body is None or isinstance(body, bytes):
        return fingerprint(body or b"")
    try:
        payload = encode_result(body).body
    except ValueError:
        return None
    # The fields of a class depend on the version of the code.
    field_set = field_set_of_value(body)
    return fingerprint(payload) if field_set is None else fingerprint_of_fields(field_set, payload)


@dataclass(frozen=True, slots=True)
class End:
    """The end of the work of a record."""

    settled: bool
    """Whether the record may be committed."""
    done: Executed[Any] | Completed | None = None
    error: Exception | None = None
    is_discarded: bool = False
    """Whether a rule has discarded the record: it has no value, and is not given up."""


def end_of(work: Work, outcome: Outcome[Any]) -> End:
    """Convert an outcome other than `InProgress` and `Scheduled` to the end of a record's work."""
    if isinstance(outcome, Discarded):
        return End(True, is_discarded=True)
    if isinstance(outcome, Completed) and discarded_error(outcome.result) is not None:
        return End(True, done=outcome, is_discarded=True)
    if isinstance(outcome, Executed | Completed):
        return End(True, done=outcome)
    settled = outcome.given_up if isinstance(outcome, HandlerFailed) else True
    return End(settled, error=error_of(work.key.label, outcome))


def note_discarded(manager: IdempotencyManager, work: Work, name: str, outcome: Outcome[Any]) -> None:
    """Count and log that a record was discarded, if `outcome` says so; `name` is that of its function."""
    if not isinstance(outcome, Discarded):
        return
    manager.observer.count(Signal.DISCARDED)
    reason = describe_error(outcome.error)
    logger.warning(
        "%s: %s failed at attempt %d (%s), discarded by a rule", work.key.label, name, outcome.attempt, reason
    )


def stop_of(work: Work, name: str, outcome: Outcome[Any]) -> ServiceStoppedError | None:
    """Return the error that stops a loop, if a rule says so; `name` is that of the function that failed."""
    match outcome:
        case HandlerFailed(given_up=False, rule=FailureRule(action=FailureAction.STOP) as rule):
            stopped = ServiceStoppedError(work.key.label, name, str(rule), describe_error(outcome.error))
            stopped.__cause__ = outcome.error
            return stopped
        case _:
            return None


def refuse_async(function: Callable[..., Any]) -> None:
    """Reject an async function in a loop that runs in a thread.

    Raises:
        ApplicationError: `function` is async or a generator.
    """
    refuse_generator(function)
    if is_async(function):
        raise ApplicationError(
            f"{named(function)} is an async function, and a confluent-kafka loop calls plain functions: write `def`, "
            "or use integr8s_idem.integrations.aiokafka"
        )


def require_async(function: Callable[..., Any]) -> None:
    """Require an async function, as far as this can be checked before it is called.

    Raises:
        ApplicationError: `function` is a plain function or a generator.
    """
    refuse_generator(function)
    inner = inspect.unwrap(getattr(function, "func", function))
    is_plain = inspect.isroutine(inner) and not inspect.iscoroutinefunction(inner)
    if is_plain and getattr(inner, "__name__", "") != "<lambda>":
        raise ApplicationError(
            f"{named(function)} is a plain function, and an aiokafka loop calls async functions: write `async def`, "
            "or use integr8s_idem.integrations.confluent"
        )


def require_awaitable(value: object, function: Callable[..., Any]) -> None:
    """Check that `function` returned an awaitable.

    Raises:
        ApplicationError: `value` cannot be awaited.
    """
    if not inspect.isawaitable(value):
        raise ApplicationError(
            f"{named(function)} returned {type(value).__name__}, which cannot be awaited: pass an async function"
        )


def value_of(end: End, work: Work, function: Callable[..., object]) -> object:
    """Return the value of work that is done: that of this run, or the stored result of an earlier one."""
    assert end.done is not None
    return end.done.value if isinstance(end.done, Executed) else replayed_value(work.key.label, end.done, function)


def pause_after(failures: int) -> float:
    """Return the seconds to wait after `failures` consecutive failures."""
    return min(FIRST_PAUSE * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE)


_LATEST: Final = WeakValueDictionary[int, Any]()
"""The offsets of the latest loop of each consumer, by the consumer's id.  They keep their consumer alive."""


def take_over(consumer: object, offsets: T) -> T | None:
    """Register the offsets of a new loop; return those of the previous loop of `consumer`, if they still exist.

    A loop that was left may not be closed yet: a variable or a traceback refers to its generator, or asyncio closes it
    later.  The new loop closes the offsets first, or it would not fetch the record that the previous one has left.
    """
    previous: T | None = _LATEST.get(id(consumer))
    _LATEST[id(consumer)] = offsets
    return previous
