"""Select dead-letter topics: those of a platform, those named on the command line, or all by their suffix."""

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


async def platform_topics(platform: Platform, settings: Settings) -> list[str]:
    """Return the topics that the services of `platform` read, according to their containers.

    Raises:
        ApplicationError: A container provides no dispatcher.
    """
    found: list[str] = []
    for service in platform.services.values():
        try:
            found += await _service_topics(service, settings)
        except ApplicationError as error:
            raise ApplicationError(
                f"cannot determine the topics of service {service.name}: {error.reason.rstrip('.')}. "
                "Alternatively, name topics with --topic"
            ) from error
    return list(dict.fromkeys(found))


async def _service_topics(service: Service, settings: Settings) -> Sequence[str]:
    with as_it_is():
        container = make_container(service, settings)
        try:
            dispatcher = await get_dispatcher(container, service.name)
            publisher = await get_publisher(container, service.name)
            return topics_read(section_of(service, settings), dispatcher, publisher)
        finally:
            await bounded(container.close(), CLOSE_SECONDS)


def dead_letter_topics(
    kafka: KafkaSettings, existing: Collection[str], *, named: Sequence[str] = (), read: Iterable[str] | None = None
) -> list[str]:
    """Return the selected dead-letter topics; there may be none.

    Args:
        kafka: Settings with the topics' prefix and suffix.
        existing: All topics of the cluster.
        named: Names from the command line: a dead-letter topic or its original topic, with or without the prefix.
        read: Topics that the services of a platform read.

    Raises:
        ApplicationError: A named topic does not exist.
    """
    prefix, suffix = kafka.topic_prefix, kafka.dead_letter_suffix
    if named:
        return list(dict.fromkeys(_named(kafka, existing, name) for name in named))
    if read is not None:
        return [topic + suffix for topic in read if topic + suffix in existing]
    return sorted(topic for topic in existing if topic.endswith(suffix) and topic.startswith(prefix))


def no_topics_note(kafka: KafkaSettings, read: Sequence[str] | None) -> str:
    """Explain why there may be no topics: nothing was dead-lettered, or the settings differ from the services'."""
    prefix, suffix = kafka.topic_prefix, kafka.dead_letter_suffix
    if read is not None:
        missing = f"none of {', '.join(topic + suffix for topic in read)} exists"
    else:
        missing = f"no topic{f' starts with {prefix} and' if prefix else ''} ends with {suffix}"
    return (
        f"{kafka.bootstrap_servers}: {missing}. Either nothing has been dead-lettered, or [kafka] topic_prefix and "
        "dead_letter_suffix differ from the settings of the services"
    )


def _named(kafka: KafkaSettings, existing: Collection[str], name: str) -> str:
    prefix, suffix = kafka.topic_prefix, kafka.dead_letter_suffix
    whole = name if name.endswith(suffix) else name + suffix
    for topic in (whole, prefix + whole):
        if topic in existing:
            return topic
    near = get_close_matches(whole, [topic for topic in existing if topic.endswith(suffix)], n=1)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    raise ApplicationError(
        f'dead-letter topic "{whole}" not found on {kafka.bootstrap_servers}{hint}; '
        "the first dead letter creates its topic"
    )
