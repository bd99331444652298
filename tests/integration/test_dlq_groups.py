"""Groups of dead letters, listed and replayed by `integr8s-idem dlq`, on real Kafka."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from integr8s_idem.config import KafkaSettings
from tests.integration.test_dlq import dlq_for
from tests.support.dead_letters import Dlq, dead_letter_of, post
from tests.support.kafka import Kafka
from tests.support.workers import kafka_settings

pytestmark = pytest.mark.kafka


@pytest.fixture
def dlq(kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path) -> Dlq:
    return dlq_for(kafka, topic_prefix, redis_url, tmp_path)


@pytest.fixture
async def settings(kafka: Kafka, topic_prefix: str) -> KafkaSettings:
    """Create dead letters of two groups: 12 with an invalid card, 3 after a timeout."""
    topic = f"{topic_prefix}order_placed"
    await kafka.create_topics({topic: 1, f"{topic}.dlq": 1})
    settings = kafka_settings(kafka, topic_prefix)
    errors = [ValueError(f"no such card: {number}") for number in range(12)]
    errors += [TimeoutError(f"no answer from bank-{number}.example:443") for number in range(3)]  # type: ignore[misc]
    await post(settings, [dead_letter_of(number, topic=topic, error=error) for number, error in enumerate(errors)])
    return settings


async def test_dead_letters_are_listed_by_group_and_replayed_by_group(
    dlq: Dlq, settings: KafkaSettings, topic_prefix: str
) -> None:
    listed = (await dlq.typed("list", "--group", "--json")).json
    shown = await dlq.typed("list", "--group", "--error", "TimeoutError")
    card, bank = listed["groups"]

    assert listed["dead_letters"] == 15
    assert [(row["dead_letters"], row["pattern"]) for row in listed["groups"]] == [
        (12, "ValueError: no such card: <number>"),
        (3, "TimeoutError: no answer from <address>"),
    ]
    assert shown.out.splitlines()[:3] == ["3 dead letters", "", f"{bank['group']}  3  billing charge  handler_failed"]

    exported = await dlq.typed("export", "--group", bank["group"])
    both = await dlq.typed("replay", "--dry-run", "--json", "--group", card["group"], "--group", bank["group"])
    neither = await dlq.typed("replay", "--dry-run", "--json", "--group", card["group"], "--error", "TimeoutError")
    invalid = await dlq.typed("replay", "--group", "charge", "--yes")
    replayed = await dlq.typed("replay", "--group", bank["group"], "--yes", "--json")

    assert [line["place"] for line in exported.lines] == [
        f"{topic_prefix}order_placed.dlq:0:{at}" for at in (12, 13, 14)
    ]
    assert (both.json["published"], neither.json["published"]) == (15, 0)
    assert (invalid.status, replayed.json["published"]) == (2, 3)
    assert dlq.audit[0]["asked"]["group"] == [bank["group"]]


async def test_a_replay_keeps_to_its_rate(dlq: Dlq, settings: KafkaSettings) -> None:
    started = time.monotonic()

    replayed = await dlq.typed("replay", "--yes", "--json", "--rate", "10/s", "--limit", "12")
    took = time.monotonic() - started
    invalid = await dlq.typed("replay", "--yes", "--rate", "fast")

    assert replayed.json["published"] == 12
    assert took >= 1.1, "the twelfth follows the first after 1.1 s"
    assert (invalid.status, "50/s" in invalid.err) == (2, True)
    assert dlq.audit[0]["asked"]["rate"] == 10
