"""Commands whose standard output is full, or was closed by its reader: `>/dev/full`, `| head`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from integr8s_idem.config import KafkaSettings
from tests.support.dead_letters import Dlq, dead_letter_of, post
from tests.support.kafka import Kafka
from tests.support.keys_desk import Desk
from tests.support.replays import SECRET
from tests.support.workers import kafka_settings

SQLITE = 'kind = "sqlite"\npath = "idem.db"'
FULL, CLOSED = "No space left on device", "Broken pipe"


def desk_in(folder: Path) -> Desk:
    """Return a store with a record of each kind."""
    desk = Desk(folder, f'kind = "sqlite"\npath = "{folder}/idem.db"')
    assert ran(folder, ["store", "migrate"], sys.stdout.fileno()).returncode == 0
    desk.fill()
    return desk


def ran(folder: Path, arguments: Sequence[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "integr8s_idem", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_STATE_HOME": str(folder / "state")},
    )


def without_output(folder: Path, reason: str, *arguments: str) -> tuple[int, str]:
    """Run a command that cannot write its output; return its exit status and standard error."""
    if reason == FULL:
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stdout = os.pipe()
        os.close(reader)
    try:
        answer = ran(folder, arguments, stdout)
    finally:
        os.close(stdout)
    return answer.returncode, answer.stderr


def lost(summary: str, reason: str) -> tuple[int, str]:
    """Return what a change answers whose report is lost."""
    return 1, f"{summary}\nOnly this report could not be written to standard output: {reason}\n"


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("reason", [FULL, CLOSED])
def test_a_change_of_records_is_reported_even_if_its_output_is_lost(tmp_path: Path, reason: str, as_json: bool) -> None:
    desk = desk_in(tmp_path)
    options = ["--yes", *(["--json"] if as_json else [])]

    purged = without_output(tmp_path, reason, "keys", "purge", "order_placed:1", *options)
    released = without_output(tmp_path, reason, "keys", "release", "held", "--force", *options)

    assert purged == lost("purged: 1 record (billing: 1 completed)", reason)
    assert released == lost("released: 1 record (billing: 1 processing)", reason)
    assert "order_placed:1" not in desk.labels()


@pytest.mark.parametrize("reason", [FULL, CLOSED])
def test_a_migration_is_reported_even_if_its_output_is_lost(tmp_path: Path, reason: str) -> None:
    (tmp_path / "settings.toml").write_text(f"[store]\n{SQLITE}\n")

    status, errors = without_output(tmp_path, reason, "store", "migrate")

    assert (status, errors.splitlines()[0]) == (1, "version 1: add records and the outbox")
    assert errors.endswith(f"done\nOnly this report could not be written to standard output: {reason}\n")
    assert without_output(tmp_path, reason, "store", "migrate") == lost("the tables are up to date", reason)
    assert without_output(tmp_path, reason, "store", "purge") == lost("0 records purged", reason)


def test_a_new_application_is_reported_even_if_its_output_is_lost(tmp_path: Path) -> None:
    status, errors = without_output(tmp_path, CLOSED, "new", "billing")

    assert (status, errors.partition(" ")[2].splitlines()[0]) == (1, "files written to billing/")
    assert (tmp_path / "billing" / "pyproject.toml").exists()


READING = [
    ("keys", "list"),
    ("keys", "show", "held"),
    ("keys", "explain", "held"),
    ("settings", "check"),
    ("settings", "example"),
    ("store", "sql"),
    ("errors",),
    ("--version",),
]


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_commands_that_only_read_accept_that_their_reader_closes_the_pipe(
    tmp_path: Path, arguments: Sequence[str]
) -> None:
    desk_in(tmp_path)

    assert without_output(tmp_path, CLOSED, *arguments)[0] == 0
    assert without_output(tmp_path, FULL, *arguments)[0] == 1


def test_a_closed_pipe_does_not_hide_invalid_settings_or_findings(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[kafka]\nclient_idd = 'x'\n")

    assert without_output(tmp_path, CLOSED, "settings", "check", "--json")[0] == 2
    assert without_output(tmp_path, CLOSED, "doctor", "--json")[0] == 2


@pytest.fixture
def dlq(kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path) -> Dlq:
    kafka_lines = f'bootstrap_servers = "{kafka.bootstrap}"\ntopic_prefix = "{topic_prefix}"'
    file = tmp_path / "settings.toml"
    file.write_text(
        f'[kafka]\n{kafka_lines}\n[store]\nurl = "{redis_url}"\n[replay]\nsecret = "{SECRET}"\n', encoding="utf-8"
    )
    return Dlq(file)


@pytest.fixture
async def source(kafka: Kafka, topic_prefix: str) -> str:
    """Create a topic with two dead letters."""
    topic = f"{topic_prefix}order_placed"
    await kafka.create_topics({topic: 1, f"{topic}.dlq": 1})
    settings: KafkaSettings = kafka_settings(kafka, topic_prefix)
    await post(settings, [dead_letter_of(number, topic=topic) for number in range(2)])
    return topic


@pytest.mark.kafka
@pytest.mark.parametrize("reason", [FULL, CLOSED])
async def test_a_replay_is_reported_even_if_its_output_is_lost(dlq: Dlq, source: str, reason: str) -> None:
    folder, arguments = dlq.settings.parent, ("dlq", "replay", "--yes", "--again")

    status, errors = await asyncio.to_thread(without_output, folder, reason, *arguments)

    assert (status, errors.splitlines()[0]) == (1, "2 dead letters replayed")
    assert errors.endswith(f"\nOnly this report could not be written to standard output: {reason}\n")
    assert [line["says"] for line in dlq.audit] == ["begun", "ended"]


@pytest.mark.kafka
@pytest.mark.parametrize("command", ["list", "list --group", "list --summary", "export", "replay --dry-run"])
async def test_commands_that_read_dead_letters_accept_that_their_reader_closes_the_pipe(
    dlq: Dlq, source: str, command: str
) -> None:
    folder, arguments = dlq.settings.parent, ("dlq", *command.split())

    assert await asyncio.to_thread(without_output, folder, CLOSED, *arguments) == (0, "")
    full = await asyncio.to_thread(without_output, folder, FULL, *arguments)
    assert full == (1, f"cannot write to standard output: {FULL}\n")
