"""`integr8s-idem dlq` as a process, on real Kafka and real Redis."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem import EventPublisher, IdempotencyManager, MemoryIdempotencyRepository, Settings
from integr8s_idem.config import KafkaSettings
from integr8s_idem.operations.dead_letter_reader import open_dead_letter_reader
from integr8s_idem.worker.kafka_protocols import Partition
from tests.packaging.repository import code_blocks
from tests.support.broken_shop import NoSuchCardError
from tests.support.conditions import eventually
from tests.support.dead_letters import ROOT, Dlq, dead_letter_of, post
from tests.support.kafka import Kafka, KafkaBroker
from tests.support.processes import ServiceProcess
from tests.support.replays import SECRET
from tests.support.shop import journal_of
from tests.support.workers import OrderPlaced, kafka_settings

pytestmark = pytest.mark.kafka

PLATFORM = "tests.support.broken_shop:platform"


def dlq_for(kafka: Kafka, prefix: str, redis_url: str, folder: Path, more: str = "") -> Dlq:
    """Return the command, with a settings file for this test."""
    services = "\n".join(
        f"[services.{name}]\ngroup_id = '{prefix}{name}'\nmax_attempts = 1\nretry_max_seconds = 0.1\n"
        "retry_initial_seconds = 0.1"
        for name in ("billing", "audit")
    )
    folder.mkdir(exist_ok=True)
    (folder / "settings.toml").write_text(
        f"""
[kafka]
bootstrap_servers = "{kafka.bootstrap}"
topic_prefix = "{prefix}"
session_timeout_seconds = 6
heartbeat_interval_seconds = 0.5
metadata_max_age_seconds = 1
{more}
[store]
url = "{redis_url}"
[replay]
secret = "{SECRET}"
[telemetry]
metrics_enabled = false
{services}
"""
    )
    return Dlq(folder / "settings.toml")


@pytest.fixture
def dlq(kafka: Kafka, topic_prefix: str, redis_url: str, tmp_path: Path) -> Dlq:
    return dlq_for(kafka, topic_prefix, redis_url, tmp_path)


@pytest.fixture
async def source(kafka: Kafka, topic_prefix: str) -> str:
    """Create a topic and its dead-letter topic, with one partition each."""
    await kafka.create_topics({f"{topic_prefix}order_placed": 1, f"{topic_prefix}order_placed.dlq": 1})
    return f"{topic_prefix}order_placed"


@pytest.fixture
def settings(kafka: Kafka, topic_prefix: str) -> KafkaSettings:
    return kafka_settings(kafka, topic_prefix)


class Shop:
    """Both services in one process, and the journal of their side effects."""

    def __init__(self, dlq: Dlq, settings: KafkaSettings) -> None:
        folder = dlq.settings.parent
        self._dlq, self._settings = dlq, settings
        self._broken, self._journal = folder / "broken", folder / "journal"
        env = {"SHOP_BROKEN": str(self._broken), "SHOP_JOURNAL": str(self._journal)}
        self._broken.touch()
        arguments = (PLATFORM, "--settings", str(dlq.settings), "--json")
        self.process = ServiceProcess(*arguments, log=folder / "shop.log", env=env)

    def breaks_at(self, *orders: str) -> None:
        """Set the orders that cannot be charged from now on."""
        self._broken.write_text("\n".join(orders))

    async def place(self, *orders: str) -> None:
        publisher = EventPublisher(self._settings)
        await publisher.publish(*(OrderPlaced(order_id=order, aggregate_id="one-customer") for order in orders))
        await publisher.close()

    def done(self, what: str) -> Counter[str]:
        return Counter(order for noted, order, _, _ in journal_of(self._journal) if noted == what)

    async def until(self, condition: Callable[[], object]) -> None:
        await eventually(condition, state=lambda: self.process.output)

    async def until_dead_letters(self, count: int) -> None:
        """Wait until the workers have logged `count` dead letters."""
        await self.until(lambda: self.process.output.count("dead-lettered ") >= count)


async def test_a_dead_letter_is_found_explained_and_after_the_fix_handled_exactly_once(
    dlq: Dlq, source: str, settings: KafkaSettings
) -> None:
    shop = Shop(dlq, settings)
    with shop.process:
        shop.breaks_at("lost", "worse")
        await shop.place("lost", "well", "worse")
        await shop.until_dead_letters(2)

        listed = await dlq.ran("list", "--json", "--error", "no such CARD", "--service", "billing")
        shown = await dlq.typed("show", listed.lines[0]["place"], "--app", PLATFORM)

        assert [dead_letter["error"] for dead_letter in listed.lines] == [
            "NoSuchCardError: no such card: lost",
            "NoSuchCardError: no such card: worse",
        ]
        assert "service     billing (group" in shown.out
        assert "generation 0  failed at attempt 1" in shown.out
        assert f"would be published to {source} as generation 1" in " ".join(shown.out.split())

        shop.breaks_at("worse")
        # One dead letter each: one that both replays publish and that fails again may be dead-lettered once or twice.
        chosen = ("no such card: lost", "no such card: worse")
        both = await asyncio.gather(*(dlq.ran("replay", "--yes", "--json", "--error", error) for error in chosen))
        await shop.until(lambda: shop.done("charged")["lost"])
        await shop.until_dead_letters(3)

        assert [(each.status, each.err) for each in both] == [(0, "")] * 2
        assert [each.json["published"] for each in both] == [1, 1]

        shop.breaks_at()
        again = await dlq.ran("replay", "--yes", "--json")
        await shop.until(lambda: shop.done("charged")["worse"])

        assert again.json["published"] == 1
        assert again.json["skipped"] == {"handled": 1, "failed_again": 1}

        nothing = await dlq.typed("replay", "--yes", "--json")
        anyway = await dlq.typed("replay", "--yes", "--json", "--again")
        await shop.place("last")
        await shop.until(lambda: shop.done("charged")["last"] and shop.done("audited")["last"])

    assert (nothing.json["published"], nothing.json["skipped"]) == (0, {"handled": 2, "failed_again": 1})
    assert anyway.json["published"] == 3
    assert shop.done("charged") == shop.done("audited") == {"lost": 1, "well": 1, "worse": 1, "last": 1}
    entries = Counter((line["command"], line["says"]) for line in dlq.audit)
    assert entries == {("dlq replay", "begun"): 5, ("dlq replay", "ended"): 5}
    assert dlq.audit[-1]["counts"] == {"published": 3, "destinations": {source: 3}, "skipped": {}}


async def test_an_export_is_lossless_and_does_not_overwrite_files(
    dlq: Dlq, source: str, settings: KafkaSettings, tmp_path: Path
) -> None:
    odd = dead_letter_of(2, topic=source, more=[("odd", b"\xff\x00"), ("odd", b"twice")])
    await post(settings, [dead_letter_of(1, topic=source), odd])
    file = tmp_path / "dead-letters.jsonl"

    first = await dlq.typed("export", "--output", str(file), "--topic", "order_placed")
    refused = await dlq.typed("export", "--output", str(file))
    piped = await dlq.typed("export", "--key", "order_placed:event-2", "--json")

    assert (first.status, first.err) == (0, f"2 dead letters written to {file}\n")
    assert (refused.status, refused.out) == (2, "")
    assert "use --force" in refused.err
    assert file.stat().st_mode & 0o777 == 0o600
    lines = file.read_text().splitlines()
    assert piped.out.splitlines() == lines[1:]
    message = piped.lines[0]["message"]
    assert message["headers"][2:4] == [["odd", {"base64": "/wA="}], ["odd", {"text": "twice"}]]
    assert message["value"] == {"text": (odd.value or b"").decode()}
    assert message["key"] == {"text": "customer-2"}


async def test_dead_letters_are_selected_by_time_and_place(dlq: Dlq, source: str, settings: KafkaSettings) -> None:
    await post(settings, [dead_letter_of(number, topic=source) for number in range(5)])
    everything = (await dlq.typed("list", "--json")).lines
    middle, last = everything[2], everything[4]

    since = await dlq.typed("list", "--json", "--since", last["at"])
    until = await dlq.typed("list", "--summary", "--json", "--until", "2020-01-01")
    future = await dlq.typed("list", "--summary", "--json", "--since", "2100-01-01")
    limited = await dlq.typed("list", "--json", "--limit", "2", "--since", "1h")
    one = await dlq.typed("replay", middle["place"], "--dry-run", "--json")
    nowhere = await dlq.typed("show", f"{source}.dlq:0:99")
    async with open_dead_letter_reader(settings) as reader:
        (late,) = await reader.offset_ranges([Partition(f"{source}.dlq", 0)], datetime(2100, 1, 1, tzinfo=UTC))

    assert late.length == 0  # older messages are not read at all
    assert last in since.lines
    assert (until.json["dead_letters"], future.json["dead_letters"]) == (0, 0)
    assert limited.lines == everything[:2]
    assert (one.json["published"], one.json["dry_run"]) == (1, True)
    assert (nowhere.status, "the partition contains offsets 0 to 4" in nowhere.err) == (1, True)
    assert dlq.audit == []


async def test_without_dead_letters_the_command_prints_where_it_searched(dlq: Dlq, topic_prefix: str) -> None:
    anywhere = await dlq.typed("list")
    named = await dlq.typed("list", "--topic", "nothing")
    app = await dlq.typed("list", "--app", PLATFORM, "--summary", "--json")
    replayed = await dlq.typed("replay", "--yes", "--json")

    assert [each.status for each in (anywhere, named, app, replayed)] == [0, 2, 0, 0]
    assert (app.json["dead_letters"], replayed.json["published"]) == (0, 0)
    assert "dead letters" not in anywhere.out
    assert anywhere.err.endswith("\n0 dead letters\n")
    assert anywhere.err.removesuffix("0 dead letters\n") in replayed.err
    assert f"no topic starts with {topic_prefix} and ends with .dlq" in anywhere.err
    assert 'dead-letter topic "nothing.dlq" not found' in named.err
    assert f"none of {topic_prefix}order_placed.dlq exists" in app.err


async def test_dead_letters_of_a_deleted_topic_are_skipped_and_no_topic_is_created(
    dlq: Dlq, kafka: Kafka, topic_prefix: str, settings: KafkaSettings
) -> None:
    await kafka.create_topics({f"{topic_prefix}gone.dlq": 1})
    await post(settings, [dead_letter_of(1, topic=f"{topic_prefix}gone")])

    answers = [await dlq.typed("replay", "--yes", "--json") for _ in range(2)]

    assert [answer.json["skipped"] for answer in answers] == [{"no_topic": 1}] * 2


def on_a_terminal(dlq: Dlq, *arguments: str, answer: bytes) -> tuple[int, str]:
    """Run the command on a terminal and type `answer` at its prompt; return its status and output."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        dlq.command(*arguments), cwd=ROOT, env=dlq.environment(), stdin=slave, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        seen, is_asked = b"", False
        while True:
            try:
                more = os.read(master, 4_096)
            except OSError:  # the other side is closed
                more = b""
            if not more:
                break
            seen += more
            if b"? [y/N]" in seen and not is_asked:
                is_asked = True
                os.write(master, answer)
    os.close(master)
    return process.returncode, seen.decode()


async def test_on_a_terminal_replay_counts_and_asks_for_confirmation(
    dlq: Dlq, source: str, settings: KafkaSettings
) -> None:
    await post(settings, [dead_letter_of(number, topic=source) for number in range(3)])
    refused, audit_before = await dlq.typed("replay"), dlq.audit

    no = await asyncio.to_thread(on_a_terminal, dlq, "replay", answer=b"n\n")
    unchanged = dlq.audit
    yes = await asyncio.to_thread(on_a_terminal, dlq, "replay", "--limit", "2", answer=b"y\n")

    assert (refused.status, audit_before, unchanged) == (2, [], [])
    assert "nothing was changed: no terminal to ask for confirmation. Replay 3 dead letters? Use --yes" in refused.err
    assert "nothing was changed" in no[1]
    assert (no[0], yes[0]) == (1, 0)
    assert "Replay 2 dead letters?" in yes[1]
    assert "2 dead letters replayed" in yes[1]
    assert dlq.audit[-1]["counts"]["published"] == 2


async def test_progress_on_the_terminal_does_not_mix_with_piped_output(
    dlq: Dlq, source: str, settings: KafkaSettings
) -> None:
    await post(settings, [dead_letter_of(number, topic=source) for number in range(50)])

    def piped() -> tuple[list[str], bytes]:
        master, slave = pty.openpty()
        ran = subprocess.run(
            dlq.command("list", "--json"), cwd=ROOT, env={**dlq.environment(), "TERM": "xterm"},
            stdin=slave, stdout=subprocess.PIPE, stderr=slave, check=True,
        )  # fmt: skip
        os.close(slave)
        seen = os.read(master, 100_000)
        os.close(master)
        return ran.stdout.decode().splitlines(), seen

    lines, seen = await asyncio.to_thread(piped)

    assert len(lines) == 50
    assert b"reading" in seen
    assert b"order_placed:event" not in seen


async def test_an_interrupted_replay_reports_its_progress_and_the_next_replay_completes_it(
    own_kafka: KafkaBroker, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    count = 600
    patient, hasty = (
        dlq_for(own_kafka, topic_prefix, redis_url, temporary, more)
        for temporary, more in ((tmp_path, ""), (tmp_path / "hasty", "request_timeout_seconds = 2"))
    )
    source, settings = f"{topic_prefix}order_placed", kafka_settings(own_kafka, topic_prefix)
    await own_kafka.create_topics({source: 1, f"{source}.dlq": 1})
    await post(settings, (dead_letter_of(number, topic=source, filling="x" * 8_000) for number in range(count)))

    async def in_the_middle(dlq: Dlq) -> asyncio.subprocess.Process:
        """Start a replay, and return once it publishes."""
        async with open_dead_letter_reader(settings) as reader:
            (before,) = await reader.offset_ranges([Partition(source, 0)])
            process = await dlq.start("replay", "--yes", "--json")
            while (await reader.offset_ranges([Partition(source, 0)]))[0].end == before.end:
                assert process.returncode is None, "the replay has ended"
        return process

    interrupted = await in_the_middle(patient)
    interrupted.send_signal(signal.SIGINT)
    _, message = await interrupted.communicate()
    first = patient.audit[-1]
    silent = await in_the_middle(hasty)
    os.kill(own_kafka.pid, signal.SIGSTOP)
    out, err = await silent.communicate()
    os.kill(own_kafka.pid, signal.SIGCONT)
    second = hasty.audit[-1]
    await asyncio.to_thread(own_kafka.wait_until_it_serves)
    last = await patient.typed("replay", "--yes", "--json")

    assert (interrupted.returncode, first["says"], b"interrupted" in message) == (130, "interrupted", True)
    assert silent.returncode == 1
    assert b"no answer from" in err or b"did not confirm" in out
    assert first["counts"]["published"] < count
    assert second["counts"]["published"] < count
    assert (last.status, last.json["published"]) == (0, count)
    assert await numbers_in(settings, source) == set(range(count))


async def numbers_in(settings: KafkaSettings, topic: str) -> set[int]:
    """Return the numbers of the orders in `topic`."""
    numbers: set[int] = set()
    async with open_dead_letter_reader(settings) as reader:
        async for page in reader.pages(await reader.offset_ranges([Partition(topic, 0)])):
            values: list[Any] = [dead_letter.record.value for dead_letter in page.dead_letters]
            numbers |= {int(value.partition(b'"event_id":"event-')[2].partition(b'"')[0]) for value in values}
    return numbers


PAGE = (ROOT / "docs" / "how-to" / "replay-a-dead-letter.md").read_text(encoding="utf-8")
(GROUP_ID,) = re.findall(r"--group ([0-9a-f]{12}) --rate", PAGE)
TYPED = [shlex.split(line)[2:] for line in PAGE.splitlines() if line.strip().startswith("integr8s-idem dlq ")]


async def test_the_commands_in_the_guide_work(
    dlq: Dlq, source: str, settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await post(settings, [dead_letter_of(number, topic=source, error=NoSuchCardError("no")) for number in range(20)])
    monkeypatch.chdir(tmp_path)
    [group] = [each["group"] for each in (await dlq.typed("list", "--group", "--json")).json["groups"]]

    for words in TYPED:
        here = [word.replace("order_placed", source).replace(GROUP_ID, group) for word in words]
        refused = {"replay": 2}.get(words[0], 0) if not {"--yes", "--dry-run"} & set(words) else 0

        answer = await dlq.typed(*here)

        assert answer.status == refused, answer
        assert ("no terminal to ask for confirmation" in answer.err) is bool(refused)
        assert "0 dead letters" not in answer.out.splitlines()

    assert len(TYPED) == 9
    assert (tmp_path / "dead-letters.jsonl").read_text().count("\n") == 20


async def test_the_code_in_the_guide_replays_a_dead_letter(settings: KafkaSettings, source: str) -> None:
    page: dict[str, Any] = {}
    exec(compile(code_blocks(PAGE, "python")[0], "replay-a-dead-letter.md", "exec"), page)
    publisher, repository = EventPublisher(settings), MemoryIdempotencyRepository()
    manager = IdempotencyManager(repository=repository, scope="billing")

    history = await page["replay"](dead_letter_of(5, topic=source), Settings(kafka=settings), publisher, manager)
    await publisher.close()

    assert history == {}
    assert await numbers_in(settings, source) == {5}
