"""Read one Kafka message by its place, without a consumer group."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from integr8s_idem.codecs import IdFromHeader, codec_of, header
from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.errors import ApplicationError, UndecodableEventError
from integr8s_idem.events import read_json
from integr8s_idem.worker.client_options import bounded, connection_options
from integr8s_idem.worker.client_stop import bounded_stop
from integr8s_idem.worker.kafka_protocols import Partition, Record

_TOPIC: Final = r"(?P<topic>[A-Za-z0-9._-]{1,249})"
_PLACES: Final = (
    re.compile(_TOPIC + r":(?P<partition>\d{1,9}):(?P<offset>\d{1,18})"),
    re.compile(_TOPIC + r"\[(?P<partition>\d{1,9})\]@(?P<offset>\d{1,18})"),
)
"""As on the command line and in spans, and as in log lines."""
_CLOSE_SECONDS: Final = 2.0
_RETRY_SECONDS: Final = 0.02
_POLL_MS: Final = 500


class MessagePlace(NamedTuple):
    """The topic, partition and offset of a message."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def parse_place(text: str) -> MessagePlace | None:
    """Parse `topic:partition:offset`, or `topic[partition]@offset` as in log lines; return `None` for another form."""
    for form in _PLACES:
        if found := form.fullmatch(text):
            return MessagePlace(found["topic"], int(found["partition"]), int(found["offset"]))
    return None


async def message_at(kafka: KafkaSettings, place: MessagePlace) -> Record:
    """Return the message at `place`, without creating its topic.

    Raises:
        ApplicationError: The message does not exist, or the brokers do not answer.
    """
    consumer: Any = AIOKafkaConsumer(
        **connection_options(kafka),
        group_id=None,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_committed",
    )
    try:
        return await bounded(_read(consumer, kafka, place), 3 * kafka.request_timeout_seconds)
    except (KafkaError, OSError, TimeoutError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ApplicationError(f"cannot read {place} from {kafka.bootstrap_servers}: {reason[:300]}") from error
    finally:
        await _stop(consumer)


async def _read(consumer: Any, kafka: KafkaSettings, place: MessagePlace) -> Record:
    await consumer.start()
    # Request all topics: requesting one creates it on brokers with automatic topic creation.
    if place.topic not in await consumer.topics():
        raise ApplicationError(f"topic {place.topic} not found on {kafka.bootstrap_servers}")
    partition = Partition(place.topic, place.partition)
    consumer.assign([partition])
    known = await _partitions(consumer, place.topic)
    if place.partition not in known:
        raise ApplicationError(f"topic {place.topic} has partitions 0 to {max(known)}, not {place.partition}")
    begin = (await consumer.beginning_offsets([partition]))[partition]
    end = (await consumer.end_offsets([partition]))[partition]
    if not begin <= place.offset < end:
        problem = "has been deleted" if place.offset < begin else "does not exist yet"
        content = f"contains offsets {begin} to {end - 1}" if end > begin else "is empty"
        raise ApplicationError(f"message {place} {problem}: the partition {content}")
    consumer.seek(partition, place.offset)
    while True:
        messages = (await consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=1)).get(partition)
        if messages:
            if messages[0].offset != place.offset:
                raise ApplicationError(
                    f"message {place} not found: it was removed by compaction or is a transaction marker; "
                    f"the next message has offset {messages[0].offset}"
                )
            found: Record = messages[0]
            return found
        if await consumer.position(partition) > place.offset:
            raise ApplicationError(f"message {place} not found: it is a transaction marker, and no message follows")


async def _partitions(consumer: Any, topic: str) -> set[int]:
    while True:
        known: set[int] | None = consumer.partitions_for_topic(topic)
        if known:
            return known
        # The client requests the metadata of assigned topics in the background.
        await asyncio.sleep(_RETRY_SECONDS)


async def _stop(consumer: Any) -> None:
    try:
        await bounded_stop(consumer, _CLOSE_SECONDS)
    except (KafkaError, OSError, TimeoutError):
        return  # nothing is left to send


@dataclass(frozen=True, slots=True)
class EventIdentity:
    """Type and id of the event in a message."""

    event_type: str
    event_id: str


def event_identities(message: Record, sections: Iterable[ServiceSettings]) -> Iterator[EventIdentity]:
    """Yield the identities that services with these settings may decode from `message`."""
    seen: set[EventIdentity] = set()
    for fields in decoded_fields(message, sections):
        if not isinstance(fields, UndecodableEventError):
            yield from _new(seen, fields.get("event_type"), fields.get("event_id"))
    yield from _new(seen, header(message.headers, "event_type"), header(message.headers, "event_id"))


def decoded_fields(
    message: Record, sections: Iterable[ServiceSettings]
) -> Iterator[Mapping[str, Any] | UndecodableEventError]:
    """Yield the fields of `message` by the default settings and by each of `sections`, or why there are none."""
    for section in (ServiceSettings(), *sections):
        codec = codec_of(section.envelope, read_json)
        if section.event_id_header is not None:
            codec = IdFromHeader(codec, section.event_id_header)
        try:
            if not message.value:
                raise UndecodableEventError("empty", "the message has no body")
            yield codec.fields(message.value, message.headers)
        except UndecodableEventError as error:
            yield error


def _new(seen: set[EventIdentity], event_type: object, event_id: object) -> Iterator[EventIdentity]:
    if isinstance(event_id, str) and event_id:
        found = EventIdentity(event_type if isinstance(event_type, str) else "", event_id)
        if found not in seen:
            seen.add(found)
            yield found
