"""Read the settings of topics and brokers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import IncompatibleBrokerVersion, KafkaError, UnknownTopicOrPartitionError, for_code

from integr8s_idem.config import KafkaSettings
from integr8s_idem.errors import BrokerUnavailableError
from integr8s_idem.worker.client_options import bounded, connection_options
from integr8s_idem.worker.retention import PRODUCER, BrokerFacts, TopicSettings

_OF_TOPICS: Final = ("retention.ms", "cleanup.policy", "max.message.bytes")
_COMPRESSION: Final = "compression.type"
_LEAST, _MOST, _CREATES = (
    "group.min.session.timeout.ms",
    "group.max.session.timeout.ms",
    "auto.create.topics.enable",
)
_CLOSE_SECONDS: Final = 2.0


class BrokerMetadataError(Exception):
    """The brokers do not support DescribeConfigs."""


async def read_facts(kafka: KafkaSettings, topics: Collection[str]) -> BrokerFacts:
    """Read the settings of `topics` and of the brokers.  Topics are not created.

    Each call may take `kafka.request_timeout_seconds`, and all calls together twice as long.

    Raises:
        BrokerUnavailableError: The brokers do not respond, or their response is invalid.
        BrokerMetadataError: The brokers do not support DescribeConfigs.
    """
    admin: Any = AIOKafkaAdminClient(**connection_options(kafka))
    try:
        return await bounded(_read(admin, topics), 2 * kafka.request_timeout_seconds)
    except IncompatibleBrokerVersion as error:
        raise BrokerMetadataError(
            f"the brokers at {kafka.bootstrap_servers} do not support DescribeConfigs: cannot read topic settings"
        ) from error
    except (KafkaError, OSError, TimeoutError) as error:
        raise unavailable(kafka, error) from error
    finally:
        await _closed(admin)


async def reach_brokers(kafka: KafkaSettings) -> None:
    """Return when a broker has responded.

    Raises:
        BrokerUnavailableError: No broker responds.
    """
    admin: Any = AIOKafkaAdminClient(**connection_options(kafka))
    try:
        await bounded(admin.start(), kafka.request_timeout_seconds)
    except (KafkaError, OSError, TimeoutError) as error:
        raise unavailable(kafka, error) from error
    finally:
        await _closed(admin)


async def list_topics(kafka: KafkaSettings, wanted: Collection[str] = ()) -> Collection[str]:
    """Return the names of the topics that this user may see.

    Args:
        kafka: The settings.
        wanted: Topics that the brokers create if they create topics at first use.

    Raises:
        BrokerUnavailableError: No broker responds.
    """
    admin: Any = AIOKafkaAdminClient(**connection_options(kafka))

    async def listed() -> Collection[str]:
        await admin.start()
        if wanted:
            await admin.describe_topics(list(wanted))
        names: Collection[str] = await admin.list_topics()
        return names

    try:
        return await bounded(listed(), kafka.request_timeout_seconds)
    except (KafkaError, OSError, TimeoutError) as error:
        raise unavailable(kafka, error) from error
    finally:
        await _closed(admin)


def unavailable(kafka: KafkaSettings, error: Exception) -> BrokerUnavailableError:
    """Convert an error of the Kafka client."""
    reason = " ".join(str(error).split()) or type(error).__name__
    # If all brokers are unavailable, the client lists every one of them.
    return BrokerUnavailableError(kafka.bootstrap_servers, reason[:300])


async def _closed(admin: Any) -> None:
    try:
        await bounded(admin.close(), _CLOSE_SECONDS)
    except (KafkaError, OSError, TimeoutError):
        return  # everything was read, and its connections are dropped with it


async def _read(admin: Any, topics: Collection[str]) -> BrokerFacts:
    await admin.start()
    brokers = (await admin.describe_cluster())["brokers"]
    wanted = [_resource(ConfigResourceType.TOPIC, name, (*_OF_TOPICS, _COMPRESSION)) for name in topics]
    if brokers:
        wanted.append(_resource(ConfigResourceType.BROKER, str(brokers[0]["node_id"]), (_LEAST, _MOST, _CREATES)))
    return facts_of([answer async for answer in _answers(admin, wanted)] if wanted else [])


def _resource(kind: ConfigResourceType, name: str, settings: Collection[str]) -> Any:
    make: Any = ConfigResource  # aiokafka does not annotate it
    return make(kind, name, dict.fromkeys(settings))


async def _answers(admin: Any, wanted: list[Any]) -> Any:
    for response in await admin.describe_configs(wanted):
        for resource in response.resources:
            yield resource


def facts_of(answers: Iterable[Any]) -> BrokerFacts:
    """Build the facts from responses to DescribeConfigs: code, message, kind, name and settings of each resource."""
    found: dict[str, TopicSettings] = {}
    missing: set[str] = set()
    unseen: dict[str, str] = {}
    own: Mapping[str, str] = {}
    for code, message, kind, name, entries, *_ in answers:
        is_topic = kind == ConfigResourceType.TOPIC
        settings = {entry[0]: entry[1] for entry in entries}
        if is_topic and code == UnknownTopicOrPartitionError.errno:
            missing.add(name)
        elif code:
            unseen[name if is_topic else ""] = message or for_code(code).__name__
        elif is_topic and not all(settings.get(wanted) for wanted in _OF_TOPICS):
            unseen[name] = "the broker does not return them"
        elif is_topic:
            found[name] = topic_settings(name, settings)
        else:
            own = settings
    return BrokerFacts(found, frozenset(missing), unseen, *_of_brokers(own))


def topic_settings(name: str, settings: Mapping[str, str]) -> TopicSettings:
    """Convert the settings that a broker returned for a topic."""
    policies = {policy.strip() for policy in settings["cleanup.policy"].split(",")}
    milliseconds = int(settings["retention.ms"])
    return TopicSettings(
        name=name,
        retention_seconds=None if milliseconds < 0 else milliseconds / 1000,
        compacts="compact" in policies,
        deletes="delete" in policies,
        max_message_bytes=int(settings["max.message.bytes"]),
        compression=settings.get(_COMPRESSION) or PRODUCER,
    )


def _of_brokers(settings: Mapping[str, str]) -> Iterator[Any]:
    creates = settings.get(_CREATES)
    yield None if creates is None else creates == "true"
    least, most = settings.get(_LEAST), settings.get(_MOST)
    yield None if least is None or most is None else (int(least) / 1000, int(most) / 1000)
