"""One message of Kafka, read by its place.  No group is joined, and no offset committed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError

from integr8s_idem.codecs import IdFromHeader, codec_of, header
from integr8s_idem.config import KafkaSettings, ServiceSettings
from integr8s_idem.errors import ApplicationError, UndecodableEventError
from integr8s_idem.events import read_json
from integr8s_idem.worker.client_options import bounded, connection_options
from integr8s_idem.worker.kafka_protocols import Partition, Record

_PLACE: Final = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,249}):(?P<partition>\d{1,9}):(?P<offset>\d{1,18})")
_CLOSE_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.02
_POLL_MS: Final = 500


class MessagePlace(NamedTuple):
    """Where a message stands."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def place_of(text: str) -> MessagePlace | None:
    """`topic:partition:offset`; `None` if it is no such thing."""
    found = _PLACE.fullmatch(text)
    return MessagePlace(found["topic"], int(found["partition"]), int(found["offset"])) if found else None


async def message_at(kafka: KafkaSettings, place: MessagePlace) -> Record:
    """The message at `place`.  Makes no topic.

    Raises:
        ApplicationError: There is none, any more or yet; or the brokers give no answer.
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
        told = " ".join(str(error).split()) or type(error).__name__
        raise ApplicationError(f"{place} cannot be read from {kafka.bootstrap_servers}: {told[:300]}") from error
    finally:
        await _stopped(consumer)


async def _read(consumer: Any, kafka: KafkaSettings, place: MessagePlace) -> Record:
    await consumer.start()
    # Asked for all: to ask for one topic makes it, where brokers make topics at their first use.
    if place.topic not in await consumer.topics():
        raise ApplicationError(f"{kafka.bootstrap_servers} have no topic {place.topic}")
    partition = Partition(place.topic, place.partition)
    consumer.assign([partition])
    known = await _partitions(consumer, place.topic)
    if place.partition not in known:
        raise ApplicationError(f"topic {place.topic} has the partitions 0 to {max(known)}, not {place.partition}")
    begin = (await consumer.beginning_offsets([partition]))[partition]
    end = (await consumer.end_offsets([partition]))[partition]
    if not begin <= place.offset < end:
        what = "is deleted already" if place.offset < begin else "is not there yet"
        held = f"holds {begin} to {end - 1}" if end > begin else "is empty"
        raise ApplicationError(f"the message {place} {what}: its partition {held}")
    consumer.seek(partition, place.offset)
    while True:
        messages = (await consumer.getmany(partition, timeout_ms=_POLL_MS, max_records=1)).get(partition)
        if messages:
            if messages[0].offset != place.offset:
                raise ApplicationError(
                    f"there is no message {place}: it was compacted away, or belongs to a transaction; "
                    f"the next one is {messages[0].offset}"
                )
            found: Record = messages[0]
            return found
        if await consumer.position(partition) > place.offset:
            raise ApplicationError(f"there is no message {place}: it belongs to a transaction, and nothing follows")


async def _partitions(consumer: Any, topic: str) -> set[int]:
    while True:
        known: set[int] | None = consumer.partitions_for_topic(topic)
        if known:
            return known
        # It has been assigned, so the client asks for it in the background.
        await asyncio.sleep(_LOOK_SECONDS)


async def _stopped(consumer: Any) -> None:
    try:
        await bounded(consumer.stop(), _CLOSE_SECONDS)
    except (KafkaError, OSError, TimeoutError):
        return  # it had nothing to tell any more, and its connections end with it


@dataclass(frozen=True, slots=True)
class Identity:
    """What names the event in a message."""

    event_type: str
    event_id: str


def identities(message: Record, sections: Iterable[ServiceSettings]) -> Iterator[Identity]:
    """How services with these settings may read the event in `message`, without its class."""
    seen: set[Identity] = set()
    for section in (ServiceSettings(), *sections):
        codec = codec_of(section.envelope, read_json)
        if section.event_id_header is not None:
            codec = IdFromHeader(codec, section.event_id_header)
        try:
            fields = codec.fields(message.value or b"", message.headers)
        except UndecodableEventError:
            continue
        yield from _new(seen, fields.get("event_type"), fields.get("event_id"))
    yield from _new(seen, header(message.headers, "event_type"), header(message.headers, "event_id"))


def _new(seen: set[Identity], event_type: object, event_id: object) -> Iterator[Identity]:
    if isinstance(event_id, str) and event_id:
        found = Identity(event_type if isinstance(event_type, str) else "", event_id)
        if found not in seen:
            seen.add(found)
            yield found
