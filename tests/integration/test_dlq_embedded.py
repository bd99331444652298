"""`integr8s-idem dlq` on the embedded Kafka, which supports neither the admin API nor offsets by time."""

from __future__ import annotations

from pathlib import Path

from integr8s_idem.config import KafkaSettings
from integr8s_idem.embedded import EmbeddedKafka
from tests.support.dead_letters import Dlq, dead_letter_of, post


async def test_dead_letters_are_found_by_time_and_replayed(tmp_path: Path) -> None:
    dlq = Dlq(tmp_path / "settings.toml")
    async with EmbeddedKafka() as kafka:
        settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        dlq.settings.write_text(f'[kafka]\nbootstrap_servers = "{kafka.bootstrap_servers}"\n[store]\nkind = "memory"\n')
        await post(settings, [dead_letter_of(number) for number in range(5)])

        early = await dlq.typed("list", "--summary", "--json", "--since", "1h")
        late = await dlq.typed("list", "--summary", "--json", "--since", "2100-01-01")
        nowhere = await dlq.typed("replay", "--yes", "--json")
        await post(settings, [dead_letter_of(9, topic="order_placed")])  # the emulator creates topics on demand
        await post(settings, [dead_letter_of(9, topic="order_placed.dlq")])
        existing = await dlq.typed("replay", "--topic", "order_placed.dlq.dlq", "--yes", "--json")

    assert (early.json["dead_letters"], late.json["dead_letters"]) == (5, 0)
    assert nowhere.json["skipped"] == {"no_topic": 5}
    assert existing.json["published"] == 1
