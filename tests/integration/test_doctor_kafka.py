"""Each problem is planted in topics on real Kafka, and the doctor reports its code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from integr8s_idem.cli.app import app
from integr8s_idem.diagnostics import Code, Finding, Severity
from tests.support.doctor import KEPT_FOR_EIGHT_DAYS, codes, found_in
from tests.support.kafka import Kafka
from tests.support.redis import RedisServer
from tests.support.shop import platform

IN_MEMORY = '[store]\nkind = "memory"\n'
SESSION = "session_timeout_seconds = 0.9\nheartbeat_interval_seconds = 0.2\n"


class Shop:
    """A topic and its dead-letter topic on the shared broker, with settings for a service that consumes it."""

    def __init__(self, kafka: Kafka, prefix: str, folder: Path) -> None:
        self.kafka = kafka
        self.topic = f"{prefix}order_placed"
        self.prefix = prefix
        self._folder = folder

    async def create(
        self, topic: Mapping[str, str] | None = None, dead_letters: Mapping[str, str] | None = None
    ) -> None:
        """Create both topics with settings that differ from the broker's."""
        await self.kafka.create_topics({self.topic: 1}, topic)
        await self.kafka.create_topics({f"{self.topic}.dlq": 1}, dead_letters)

    def text(self, more: str = "", rest: str = KEPT_FOR_EIGHT_DAYS) -> str:
        return (
            f'[kafka]\nbootstrap_servers = "{self.kafka.bootstrap}"\ntopic_prefix = "{self.prefix}"\n{more}'
            f'[services.billing]\ntopics = ["{self.topic}"]\n{rest}'
        )

    async def found(self, more: str = "", rest: str = KEPT_FOR_EIGHT_DAYS) -> list[Finding]:
        """Return the findings without the warning about the in-memory store."""
        found = await found_in(self.text(more, rest + IN_MEMORY), self._folder)
        return [finding for finding in found if finding.where != "store.kind"]


@pytest.fixture
def shop(kafka: Kafka, topic_prefix: str, tmp_path: Path) -> Shop:
    return Shop(kafka, topic_prefix, tmp_path)


async def test_matching_topics_have_no_findings(shop: Shop) -> None:
    await shop.create()

    assert codes(await shop.found()) == []


async def test_a_missing_topic_and_its_missing_dead_letters_are_found(shop: Shop) -> None:
    found = await shop.found()

    assert codes(found) == ["topic-missing", "dead-letter-topic-missing"]
    assert codes(await shop.found()) == codes(found), "the doctor created a topic"


async def test_missing_dead_letters_are_found(shop: Shop) -> None:
    await shop.kafka.create_topics({shop.topic: 1})

    assert codes(await shop.found()) == ["dead-letter-topic-missing"]


@pytest.mark.scenario(98)
async def test_a_topic_with_longer_retention_than_the_records_is_found(shop: Shop) -> None:
    await shop.create({"retention.ms": "7200000"}, {"retention.ms": "7200000"})

    (only,) = [one for one in await shop.found(rest="") if one.severity is Severity.WARNING]

    assert only.code is Code.RETENTION_LONGER
    assert "2 hours (retention.ms = 7200000), but idempotency.default_ttl_seconds = 3600" in only.what


async def test_a_topic_with_shorter_retention_than_the_default_ttl_has_no_findings(shop: Shop) -> None:
    await shop.create({"retention.ms": "1800000"}, {"retention.ms": "1800000"})

    assert codes(await shop.found(rest="")) == []


@pytest.mark.parametrize(
    ("topic", "dead_letters", "code"),
    [
        ({"retention.ms": "-1"}, {"retention.ms": "-1"}, "retention-endless"),
        ({}, {"max.message.bytes": "1000"}, "dead-letter-topic-smaller"),
        ({}, {"cleanup.policy": "compact"}, "dead-letter-topic-compacted"),
        ({}, {"retention.ms": "1000"}, "dead-letter-topic-shorter"),
        ({"max.message.bytes": "1000"}, {}, "event-limit-above-topic"),
    ],
)
async def test_an_unsuitable_topic_is_found(
    shop: Shop, topic: dict[str, str], dead_letters: dict[str, str], code: str
) -> None:
    await shop.create(topic, dead_letters)

    assert codes(await shop.found()) == [code]


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd", "producer"])
async def test_the_installed_client_reads_every_codec_of_a_topic(shop: Shop, codec: str) -> None:
    await shop.create({"compression.type": codec}, {"compression.type": codec})

    assert codes(await shop.found()) == []


async def test_a_codec_that_the_installed_client_cannot_read_is_found(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shop.create({"compression.type": "zstd"})
    monkeypatch.setattr("aiokafka.codec.cramjam", None)

    (only,) = [one for one in await shop.found() if one.severity is not Severity.INFO]

    assert (only.code, only.severity, only.where) == (Code.CODEC_UNREADABLE, Severity.ERROR, f"topic {shop.topic}")
    assert "compression.type = zstd" in only.what
    assert "pip install 'cramjam>=2.8'" in only.remedy


async def test_a_session_timeout_that_the_brokers_refuse_is_found(shop: Shop) -> None:
    await shop.create()

    (only,) = [one for one in await shop.found(SESSION) if one.severity is not Severity.INFO]

    assert (only.code, only.severity) == (Code.SESSION_TIMEOUT, Severity.ERROR)
    assert "= 0.9, the brokers allow 1 to 1800 seconds" in only.what


async def test_unavailable_brokers_are_found(tmp_path: Path) -> None:
    text = '[kafka]\nbootstrap_servers = "127.0.0.1:1"\n' + KEPT_FOR_EIGHT_DAYS + IN_MEMORY

    found = await found_in(text, tmp_path)

    assert codes(found) == ["broker-unavailable", "settings-warning"]


async def test_topics_of_an_application_are_checked(shop: Shop, tmp_path: Path) -> None:
    text = shop.text(rest=KEPT_FOR_EIGHT_DAYS + IN_MEMORY).replace(f'topics = ["{shop.topic}"]', "")

    found = await found_in(text, tmp_path, platform)

    assert [one.where for one in found if one.code is Code.TOPIC_MISSING] == [f"topic {shop.topic}"]


async def test_a_valid_setup_is_reported_in_one_line(shop: Shop, tmp_path: Path) -> None:
    await shop.create()
    with RedisServer(config={"appendonly": "yes"}) as server:
        file = tmp_path / "settings.toml"
        file.write_text(shop.text() + f'[store]\nurl = "{server.url}"\n')
        calls = [["doctor", "--settings", str(file), *more] for more in ([], ["--json"], ["--verbose"])]
        plain, as_json, verbose = [await asyncio.to_thread(CliRunner().invoke, app, call) for call in calls]

    assert (plain.output, plain.exit_code) == ("no problems found\n", 0)
    assert {one["severity"] for one in json.loads(as_json.output)} == {"info"}
    codes = [line.split()[1] for line in verbose.output.splitlines()[:-1]]
    assert sorted(codes) == ["broker-seen", "speedups-seen", "store-seen"]
