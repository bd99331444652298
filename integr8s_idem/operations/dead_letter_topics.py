"""Which topics hold dead letters: those of a platform, those that are named, or all whose names say so."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches

from integr8s_idem.config import KafkaSettings, Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.runtime import Platform, Service
from integr8s_idem.runtime.containers import get_dispatcher, get_publisher, make_container
from integr8s_idem.runtime.service_group import CLOSE_SECONDS, section_of
from integr8s_idem.stores.factory import as_it_is
from integr8s_idem.worker.client_options import bounded
from integr8s_idem.worker.consumer import topics_read


async def topics_of(platform: Platform, settings: Settings) -> list[str]:
    """What the services of `platform` read, by their containers.

    Raises:
        ApplicationError: A container gives no dispatcher.
    """
    found: list[str] = []
    for service in platform.services.values():
        try:
            found += await _topics_of(service, settings)
        except ApplicationError as error:
            raise ApplicationError(
                f"the topics of service {service.name} are not known: {error.reason.rstrip('.')}. "
                "Or name topics with --topic"
            ) from error
    return list(dict.fromkeys(found))


async def _topics_of(service: Service, settings: Settings) -> Sequence[str]:
    with as_it_is():
        container = make_container(service, settings)
        try:
            dispatcher = await get_dispatcher(container, service.name)
            publisher = await get_publisher(container, service.name)
            return topics_read(section_of(service, settings), dispatcher, publisher)
        finally:
            await bounded(container.close(), CLOSE_SECONDS)


def dead_letter_topics(
    kafka: KafkaSettings, there: Collection[str], *, named: Sequence[str] = (), read: Iterable[str] | None = None
) -> list[str]:
    """The dead-letter topics that are meant; there may be none.

    Args:
        kafka: Where they are, and how they are called.
        there: All topics of the cluster.
        named: By people: the topic, or the one whose letters it holds, with the prefix or without.
        read: What the services of a platform read.

    Raises:
        ApplicationError: One that is named is not there.
    """
    prefix, suffix = kafka.topic_prefix, kafka.dead_letter_suffix
    if named:
        return list(dict.fromkeys(_named(kafka, there, name) for name in named))
    if read is not None:
        return [topic + suffix for topic in read if topic + suffix in there]
    return sorted(topic for topic in there if topic.endswith(suffix) and topic.startswith(prefix))


def none_there(kafka: KafkaSettings, read: Sequence[str] | None) -> str:
    """What it may mean that there are none: all is well, or these are not the settings of the services."""
    prefix, suffix = kafka.topic_prefix, kafka.dead_letter_suffix
    if read is not None:
        told = f"none of {', '.join(topic + suffix for topic in read)} is there"
    else:
        told = f"no topic{f' begins with {prefix} and' if prefix else ''} ends in {suffix}"
    return (
        f"{kafka.bootstrap_servers}: {told}. Nothing was ever given up there, or [kafka] topic_prefix and "
        "dead_letter_suffix are others than those of the services"
    )


def _named(kafka: KafkaSettings, there: Collection[str], name: str) -> str:
    prefix, suffix = kafka.topic_prefix, kafka.dead_letter_suffix
    whole = name if name.endswith(suffix) else name + suffix
    for topic in (whole, prefix + whole):
        if topic in there:
            return topic
    near = get_close_matches(whole, [topic for topic in there if topic.endswith(suffix)], n=1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    raise ApplicationError(
        f'{kafka.bootstrap_servers} have no dead-letter topic "{whole}"{hint}: nothing was given up there'
    )
