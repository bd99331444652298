"""The secret that signs replays must be strong, can be configured in several ways, and is never shown.

Broker and store are in memory.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.replay_dead_letters import dead_letters
from integr8s_idem import Settings, load_settings
from integr8s_idem.cli.app import app
from integr8s_idem.config import KafkaSettings, settings_warnings
from integr8s_idem.embedded import EmbeddedKafka, load_embedded_settings, running_servers
from integr8s_idem.embedded.discovery import announced_servers
from integr8s_idem.embedded.servers import EmbeddedServers
from integr8s_idem.errors import SettingsError
from integr8s_idem.worker.dead_letters import REPLAY_SIGNATURE
from tests.support.dead_letters import Dlq, dead_letter_of, post
from tests.support.fake_consumer import FakeRecord
from tests.support.replays import OTHER_SECRET, SECRET, SIGNED

pytestmark = pytest.mark.scenario(123, 124)


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_the_settings_do_not_show_the_secret() -> None:
    for shown in (repr(SIGNED), str(SIGNED), repr(SIGNED.replay), SIGNED.model_dump_json(), str(SIGNED.model_dump())):
        assert SECRET not in shown


@pytest.mark.parametrize("weak", ["hunter2", "x" * 31, f"{SECRET} {SECRET}", f"{SECRET}\t{SECRET}"])
def test_a_weak_or_ambiguous_secret_is_rejected_and_not_shown(weak: str) -> None:
    Path("settings.toml").write_text(f"[replay]\nsecret = [{json.dumps(weak)}]\n")

    with pytest.raises(SettingsError, match="openssl rand -hex 32") as refusal:
        load_settings()

    assert weak not in str(refusal.value)
    assert "replay.secret" in str(refusal.value)


def test_a_secret_given_as_the_policy_is_not_shown() -> None:
    Path("settings.toml").write_text(f'[replay]\nunsigned = "{SECRET}"\n')

    with pytest.raises(SettingsError, match=r'replay\.unsigned *must be "refuse", "failed_only" or "trust"') as refusal:
        load_settings()

    assert SECRET not in str(refusal.value)


def test_secrets_come_from_the_environment_and_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "INTEGR8S_IDEM_REPLAY__SECRET").write_text(f"{SECRET}\n")
    monkeypatch.setenv("INTEGR8S_IDEM_SECRETS_DIR", str(tmp_path))
    assert load_settings().replay.keys == (SECRET.encode(),)

    monkeypatch.setenv("INTEGR8S_IDEM_REPLAY__SECRET", f"{OTHER_SECRET},{SECRET}")
    assert load_settings().replay.keys == (OTHER_SECRET.encode(), SECRET.encode())


def test_the_default_policy_depends_on_whether_there_is_a_secret() -> None:
    assert Settings().replay.unsigned_policy == "failed_only"
    assert SIGNED.replay.unsigned_policy == "refuse"


def test_trusting_every_producer_is_a_warning() -> None:
    trusting = Settings.model_validate({"replay": {"unsigned": "trust"}})

    assert [each.path for each in settings_warnings(trusting) if "producer" in each.message] == ["replay.unsigned"]
    assert not [each for each in settings_warnings(Settings()) if each.path == "replay.unsigned"]


def test_embedded_servers_have_a_secret_that_commands_in_the_folder_find() -> None:
    one, other = (EmbeddedServers(bootstrap_servers="localhost:7", redis_url=None) for _ in range(2))

    with announced_servers(one.settings()) as announced:
        found, mode = load_embedded_settings(), stat.S_IMODE(announced.path.stat().st_mode)
        shown = f"{running_servers()} {running_servers()!r} {one!r}"

    assert one.replay_secret != other.replay_secret
    assert found.replay.keys == (one.replay_secret.encode(),)
    assert found.replay.unsigned_policy == "refuse"
    assert mode == 0o600
    assert one.replay_secret not in shown


def test_no_command_prints_the_secret() -> None:
    Path("settings.toml").write_text(f'[replay]\nsecret = "{SECRET}"\n')

    for command in (["settings", "check"], ["settings", "example"], ["doctor", "--json"], ["settings", "show"]):
        assert SECRET not in CliRunner().invoke(app, command).output


def forged(record: FakeRecord) -> FakeRecord:
    """Return `record` with a forged source topic."""
    headers = [(name, b"payroll_secret" if name == "idempotency-dlq-topic" else text) for name, text in record.headers]
    return FakeRecord(record.topic, 0, 0, record.key, record.value, headers)


async def test_the_replay_command_publishes_to_the_source_topic_or_the_given_one(
    tmp_path: Path,
) -> None:
    dlq, topics = Dlq(tmp_path / "settings.toml"), ("order_placed", "payroll_secret", "order_placed_again")
    async with EmbeddedKafka() as kafka:
        settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        head = f'[kafka]\nbootstrap_servers = "{kafka.bootstrap_servers}"\n[store]\nkind = "memory"\n[replay]\n'
        dlq.settings.write_text(f'{head}secret = "{SECRET}"\n')
        # The emulator creates topics on demand.
        for topic in topics:
            await post(settings, [FakeRecord(topic, 0, 0, None, b"there", ())])
        await post(settings, [forged(dead_letter_of(1))])

        counted = await dlq.typed("replay", "--dry-run")
        derived = await dlq.typed("replay", "--yes", "--json")
        named = await dlq.typed("replay", "--yes", "--json", "--to", "order_placed_again")
        misspelled = await dlq.typed("replay", "--yes", "--to", "order_placed_agian")
        (listed,) = (await dlq.typed("list", "--json")).lines
        shown = await dlq.typed("show", listed["place"], "--json")
        dlq.settings.write_text(f'{head}unsigned = "refuse"\n')
        refused = await dlq.typed("replay", "--yes")
        dlq.settings.write_text(head)
        unsigned = await dlq.typed("replay", "--yes", "--json")
        found = {topic: [one async for one in dead_letters(Settings(kafka=settings), topic)] for topic in topics}

    assert "to topic order_placed: 1" in counted.out
    assert derived.json["destinations"] == {"order_placed": 1}
    assert named.json["destinations"] == {"order_placed_again": 1}
    assert misspelled.status != 0
    assert 'did you mean "order_placed_again"?' in misspelled.err
    assert {topic: len(messages) for topic, messages in found.items()} == {
        "order_placed": 3,
        "payroll_secret": 1,
        "order_placed_again": 2,
    }
    assert sum(REPLAY_SIGNATURE in dict(message.headers) for message in found["order_placed"]) == 1
    assert REPLAY_SIGNATURE not in shown.out
    assert shown.json["replay"]["topic"] == "order_placed"
    assert refused.status != 0
    assert 'unsigned = "refuse" and no secret' in refused.err
    assert unsigned.json["published"] == 1
    assert "not signed" in unsigned.err
    assert not any(SECRET in said.out + said.err for said in (counted, derived, named, misspelled, shown))
    assert SECRET not in json.dumps(dlq.audit)
    assert "order_placed_again" in json.dumps(dlq.audit)
