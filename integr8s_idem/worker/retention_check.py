"""Compare the retention and size limits of topics with the settings at startup."""

from __future__ import annotations

import logging

from integr8s_idem.config import KafkaSettings
from integr8s_idem.diagnostics import Code, Finding
from integr8s_idem.errors import BrokerUnavailableError, SettingsError, SettingsMistake
from integr8s_idem.worker.broker_facts import BrokerMetadataError, read_facts
from integr8s_idem.worker.retention import Reading, retention_findings

logger = logging.getLogger(__name__)


async def check_retention(service: str, kafka: KafkaSettings, reading: Reading) -> None:
    """Compare the settings with the topics that `service` reads, and log a warning for each finding.

    If the brokers do not respond, or do not return the topics' settings, a warning is logged.

    Raises:
        SettingsError: There is a mismatch, and `kafka.retention_check` is "refuse".
    """
    if kafka.retention_check == "off":
        return
    try:
        topics = [name for topic in reading.topics for name in (topic, topic + kafka.dead_letter_suffix)]
        facts = await read_facts(kafka, topics)
    except (BrokerUnavailableError, BrokerMetadataError) as error:
        logger.warning("%s: cannot compare the settings of its topics with the ttl and limits: %s", service, error)
        return
    found = retention_findings(kafka, [reading], facts)
    refused = [finding for finding in found if finding.code is not Code.BROKER_UNSEEN]
    if refused and kafka.retention_check == "refuse":
        raise SettingsError(
            f'service {service} does not start (kafka.retention_check = "refuse")', list(map(_mistake, refused))
        )
    for finding in found:
        logger.warning("%s: %s: %s", service, finding.where, finding)


def _mistake(finding: Finding) -> SettingsMistake:
    return SettingsMistake(finding.where, str(finding))
