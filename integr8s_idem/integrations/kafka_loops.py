"""Loops of one's own over Kafka's records: what those of aiokafka and of confluent-kafka have in common.

`aiokafka.py` and `confluent.py` beside it have `guarded(consumer, manager, …)`.

A loop takes its records one after the other.  It commits behind them from time to time, and never past a record that
is not done: one whose work fails is fetched again, and so is what lies behind it in its partition.  A record that
somebody else works on is waited for.  What our worker has besides: work side by side, retries with pauses, dead
letters, draining.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, TypeAlias

from integr8s_idem._util.committable_offsets import Placed
from integr8s_idem.codecs import header
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.results import encode_result, refuse_generator
from integr8s_idem.engine.work import Executed, HandlerFailed, Outcome, Work
from integr8s_idem.errors import (
    ApplicationError,
    InvalidKeyError,
)
from integr8s_idem.functions.sync_bridge import is_async, named
from integr8s_idem.keys import EntryPoint, Key, fingerprint, given_text
from integr8s_idem.records import Completed

FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 30.0
"""Seconds before a record whose work has failed is fetched again, growing from the first to the longest."""

COMMIT_INTERVAL: Final = timedelta(seconds=1)


class Record(Placed, Protocol):
    """One message as the broker gave it."""

    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Sequence[tuple[str, bytes]]: ...


KeyOf: TypeAlias = Callable[[Any], str]
"""Names the work of a record."""


def by_header(name: str) -> KeyOf:
    """By a header that the producer has made once for each event: copies that it sends are found, too."""

    def key_of(record: Record) -> str:
        found = header(record.headers, name.lower())
        if not found:
            place = f"{record.topic}[{record.partition}]@{record.offset}"
            raise InvalidKeyError(f"{place} has no header {name} to make a key of")
        return found

    return key_of


def by_position(record: Record) -> str:
    """By topic, partition and offset: what is delivered again is found, and a copy that a producer sends is not."""
    return f"{record.topic}:{record.partition}:{record.offset}"


def work_of(
    manager: IdempotencyManager, record: Record, key: KeyOf, ttl: timedelta | None, function: Callable[..., object]
) -> Work:
    """The work of `record`, which `function` does; its body is what a second use of the key must bring again."""
    checked = None if ttl is None else manager.checked_ttl(ttl)
    # Producers choose what is in a header: it must not name work of another entry point in the same scope.
    text = given_text(key(record))
    of = Key.of_entry(EntryPoint.KAFKA_LOOP, *text.split(":"), name=text)
    return Work(manager.space.key(of), _fingerprint_of(record.value), checked, returns=function)


def _fingerprint_of(body: object) -> bytes | None:
    """Of what came, or of what the consumer's own deserializer has made of it, if that can be written."""
    if body is None or isinstance(body, bytes):
        return fingerprint(body or b"")
    try:
        return fingerprint(encode_result(body).body)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class End:
    """How the work of a record has ended."""

    settled: bool
    """It may be committed."""
    done: Executed[Any] | Completed | None = None
    error: Exception | None = None


def end_of(work: Work, outcome: Outcome[Any]) -> End:
    """What an outcome means to a loop; `InProgress` is none."""
    if isinstance(outcome, Executed | Completed):
        return End(True, done=outcome)
    settled = outcome.given_up if isinstance(outcome, HandlerFailed) else True
    return End(settled, error=error_of(work.key.label, outcome))


def refuse_async(function: Callable[..., Any]) -> None:
    """Refuse, for a loop in a thread, a function that does nothing but make a coroutine.

    Raises:
        ApplicationError: It is one, or a generator.
    """
    refuse_generator(function)
    if is_async(function):
        raise ApplicationError(
            f"{named(function)} is an async function, and a loop of confluent-kafka calls plain ones: write `def`, or "
            "take the loop of integr8s_idem.integrations.aiokafka"
        )


def refuse_plain(function: Callable[..., Any]) -> None:
    """Refuse, for a loop that awaits, a function that would do its work and leave nothing to await.

    Raises:
        ApplicationError: It is one, as far as can be told before it is called, or a generator.
    """
    refuse_generator(function)
    inner = inspect.unwrap(getattr(function, "func", function))
    is_plain = inspect.isroutine(inner) and not inspect.iscoroutinefunction(inner)
    if is_plain and getattr(inner, "__name__", "") != "<lambda>":
        raise ApplicationError(
            f"{named(function)} is a plain function, and a loop of aiokafka awaits what it calls: write `async def`, "
            "or take the loop of integr8s_idem.integrations.confluent"
        )


def refuse_value(value: object, function: Callable[..., Any]) -> None:
    """Refuse what cannot be awaited.

    Raises:
        ApplicationError: It cannot.
    """
    if not inspect.isawaitable(value):
        raise ApplicationError(
            f"{named(function)} has returned {type(value).__name__}, which cannot be awaited: give an async function"
        )


def pause_after(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return min(FIRST_PAUSE * 2.0 ** min(failures - 1, 20), LONGEST_PAUSE)
