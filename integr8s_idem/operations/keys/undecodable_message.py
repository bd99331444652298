"""Explain a message that no service can decode: it has no record, but may have a dead letter and a trace."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from integr8s_idem.codecs import header
from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.errors import BrokerUnavailableError, UndecodableEventError
from integr8s_idem.operations.dead_letter_reader import DeadLetterReader, OffsetRange, open_dead_letter_reader
from integr8s_idem.operations.dead_letters import Place, StoredDeadLetter
from integr8s_idem.operations.keys.kafka_message import decoded_fields
from integr8s_idem.telemetry import conventions
from integr8s_idem.worker.kafka_protocols import Partition, Record

LONGEST_SEARCH: Final = 100_000
"""Maximum number of offsets of a dead-letter topic that are read."""

_CLOCK_SKEW: Final = timedelta(hours=1)
"""How much the clock of a producer may be ahead of that of the worker that dead-letters its message."""

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(?:-.*)?")


def decoding_error(message: Record, sections: Iterable[ServiceSettings]) -> UndecodableEventError | None:
    """Return why no service with these settings can decode `message`, or `None` if one may be able to."""
    first: UndecodableEventError | None = None
    for fields in decoded_fields(message, sections):
        if isinstance(fields, UndecodableEventError):
            first = first or fields
        elif isinstance(fields.get("event_id"), str) and fields["event_id"]:
            return None
        else:
            first = first or UndecodableEventError("missing_id", "the message has no event_id")
    return first


async def undecodable_notes(kafka: KafkaSettings, message: Record) -> list[str]:
    """Return notes about the dead letters and the trace of a message that cannot be decoded."""
    return [await _dead_letter_note(kafka, message), _trace_note(message)]


def _trace_note(message: Record) -> str:
    delivery = f"{message.topic}:{message.partition}:{message.offset}"
    found = _TRACEPARENT.fullmatch(header(message.headers, "traceparent") or "")
    if found is None:
        return (
            "trace: its headers name none, so each delivery starts a trace of its own; search for the span with "
            f'{conventions.DELIVERY} = "{delivery}"'
        )
    trace_id, flags = found.groups()
    if not int(flags, 16) & 1:
        return f"trace: {trace_id}, which the producer did not sample, so it has no spans"
    return f'trace: {trace_id}; its span "process {message.topic}" describes the failed delivery'


async def _dead_letter_note(kafka: KafkaSettings, message: Record) -> str:
    if message.topic.endswith(kafka.dead_letter_suffix):
        return "dead letter: this message is one"
    topic = message.topic + kafka.dead_letter_suffix
    try:
        async with open_dead_letter_reader(kafka) as reader:
            numbers = (await reader.partitions()).get(topic)
            if numbers is None:
                return f"dead letter: none, since topic {topic} does not exist"
            partitions = [Partition(topic, number) for number in numbers]
            ranges = await reader.offset_ranges(partitions, _earliest(message))
            found = [_described(each) async for each in _dead_letters_of(message, reader, ranges)]
    except BrokerUnavailableError as error:
        return f"dead letter: not searched, since {error}"
    if found:
        return f"dead letter: {', '.join(found)}"
    if sum(each.length for each in ranges) > LONGEST_SEARCH:
        return f"dead letter: none among the first {LONGEST_SEARCH:,} messages of {topic} that are later than it"
    return f"dead letter: none in {topic}; it was not delivered yet, or its dead letter has been deleted"


async def _dead_letters_of(
    message: Record, reader: DeadLetterReader, ranges: Iterable[OffsetRange]
) -> AsyncIterator[StoredDeadLetter]:
    origin, read = Place(message.topic, message.partition, message.offset), 0
    async with aclosing(reader.pages(ranges)) as pages:
        async for page in pages:
            for dead_letter in page.dead_letters:
                if dead_letter.origin == origin:
                    yield dead_letter
            read += page.offsets_read
            if read >= LONGEST_SEARCH:
                return


def _described(dead_letter: StoredDeadLetter) -> str:
    return f"{dead_letter.place} (service {dead_letter.service}, {dead_letter.reason})"


def _earliest(message: Any) -> datetime | None:
    """Return the time before which the message has no dead letter; `None` if it is unknown."""
    timestamp = getattr(message, "timestamp", -1)
    return datetime.fromtimestamp(timestamp / 1000, UTC) - _CLOCK_SKEW if timestamp > 0 else None
