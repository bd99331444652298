"""`integr8s-idem dlq` as a process, on a real Kafka and a real Redis."""

from __future__ import annotations

import asyncio
import os
import pty
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
from integr8s_idem.operations.dead_letter_reader import open_letter_box
from integr8s_idem.worker.kafka_protocols import Partition
from tests.packaging.repository import code_blocks
from tests.support.broken_shop import NoSuchCardError
from tests.support.conditions import eventually
from tests.support.dead_letters import ROOT, Dlq, letter_of, post
from tests.support.kafka import Kafka, KafkaBroker
from tests.support.processes import ServiceProcess
from tests.support.replays import SECRET
from tests.support.shop import journal_of
from tests.support.workers import OrderPlaced, kafka_settings

pytestmark = pytest.mark.kafka

PLATFORM = "tests.support.broken_shop:platform"


def dlq_for(kafka: Kafka, prefix: str, redis_url: str, folder: Path, more: str = "") -> Dlq:
    """The command with settings of its own."""
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
    """A topic and its dead-letter topic, empty, of one partition each."""
    await kafka.create_topics({f"{topic_prefix}order_placed": 1, f"{topic_prefix}order_placed.dlq": 1})
    return f"{topic_prefix}order_placed"


@pytest.fixture
def settings(kafka: Kafka, topic_prefix: str) -> KafkaSettings:
    return kafka_settings(kafka, topic_prefix)


class Shop:
    """Both services as one process, and what the world has seen of them."""

    def __init__(self, dlq: Dlq, settings: KafkaSettings) -> None:
        folder = dlq.settings.parent
        self._dlq, self._settings = dlq, settings
        self._broken, self._journal = folder / "broken", folder / "journal"
        env = {"SHOP_BROKEN": str(self._broken), "SHOP_JOURNAL": str(self._journal)}
        self._broken.touch()
        arguments = (PLATFORM, "--settings", str(dlq.settings), "--json")
        self.process = ServiceProcess(*arguments, log=folder / "shop.log", env=env)

    def breaks_at(self, *orders: str) -> None:
        """What cannot be charged from now on."""
        self._broken.write_text("\n".join(orders))

    async def place(self, *orders: str) -> None:
        publisher = EventPublisher(self._settings)
        await publisher.publish(*(OrderPlaced(order_id=order, aggregate_id="one-customer") for order in orders))
        await publisher.close()

    def done(self, what: str) -> Counter[str]:
        return Counter(order for noted, order, _, _ in journal_of(self._journal) if noted == what)

    async def until(self, fact: Callable[[], object]) -> None:
        await eventually(fact, state=lambda: self.process.output)

    async def until_letters(self, count: int) -> None:
        """Until there are `count`: workers say each in their logs."""
        await self.until(lambda: self.process.output.count("dead-lettered ") >= count)


async def test_a_dead_letter_is_found_explained_and_after_the_mending_handled_exactly_once(
    dlq: Dlq, source: str, settings: KafkaSettings
) -> None:
    shop = Shop(dlq, settings)
    with shop.process:
        shop.breaks_at("lost", "worse")
        await shop.place("lost", "well", "worse")
        await shop.until_letters(2)

        listed = await dlq.ran("list", "--json", "--error", "no such CARD", "--service", "billing")
        shown = await dlq.typed("show", listed.lines[0]["place"], "--app", PLATFORM)

        assert [letter["error"] for letter in listed.lines] == [
            "NoSuchCardError: no such card: lost",
            "NoSuchCardError: no such card: worse",
        ]
        assert "given up by billing (group" in shown.out
        assert "generation 0  failed at attempt 1" in shown.out
        assert f"publishes it to {source} as generation 1" in " ".join(shown.out.split())

        shop.breaks_at("worse")
        # One letter each: what two replays publish twice and fails again is dead-lettered twice, or not, as time goes.
        chosen = ("no such card: lost", "no such card: worse")
        both = await asyncio.gather(*(dlq.ran("replay", "--yes", "--json", "--error", error) for error in chosen))
        await shop.until(lambda: shop.done("charged")["lost"])
        await shop.until_letters(3)

        assert [(each.status, each.err) for each in both] == [(0, "")] * 2
        assert [each.json["published"] for each in both] == [1, 1]

        shop.breaks_at()
        again = await dlq.ran("replay", "--yes", "--json")
        await shop.until(lambda: shop.done("charged")["worse"])

        assert again.json["published"] == 1
        assert again.json["left_out"] == {"handled": 1, "failed_again": 1}

        nothing = await dlq.typed("replay", "--yes", "--json")
        anyway = await dlq.typed("replay", "--yes", "--json", "--again")
        await shop.place("last")
        await shop.until(lambda: shop.done("charged")["last"] and shop.done("audited")["last"])

    assert (nothing.json["published"], nothing.json["left_out"]) == (0, {"handled": 2, "failed_again": 1})
    assert anyway.json["published"] == 3
    assert shop.done("charged") == shop.done("audited") == {"lost": 1, "well": 1, "worse": 1, "last": 1}
    said = Counter((line["command"], line["says"]) for line in dlq.audit)
    assert said == {("dlq replay", "begun"): 5, ("dlq replay", "ended"): 5}
    assert dlq.audit[-1]["counts"] == {"published": 3, "destinations": {source: 3}, "left_out": {}}


async def test_an_export_holds_every_byte_and_a_file_that_is_there_stays(
    dlq: Dlq, source: str, settings: KafkaSettings, tmp_path: Path
) -> None:
    odd = letter_of(2, topic=source, more=[("odd", b"\xff\x00"), ("odd", b"twice")])
    await post(settings, [letter_of(1, topic=source), odd])
    file = tmp_path / "letters.jsonl"

    first = await dlq.typed("export", "--output", str(file), "--topic", "order_placed")
    refused = await dlq.typed("export", "--output", str(file))
    piped = await dlq.typed("export", "--key", "order_placed:event-2", "--json")

    assert (first.status, first.err) == (0, f"2 letters written to {file}\n")
    assert (refused.status, refused.out) == (2, "")
    assert "say --force" in refused.err
    assert file.stat().st_mode & 0o777 == 0o600
    lines = file.read_text().splitlines()
    assert piped.out.splitlines() == lines[1:]
    message = piped.lines[0]["message"]
    assert message["headers"][2:4] == [["odd", {"base64": "/wA="}], ["odd", {"text": "twice"}]]
    assert message["value"] == {"text": (odd.value or b"").decode()}
    assert message["key"] == {"text": "customer-2"}


async def test_letters_are_chosen_by_time_and_place(dlq: Dlq, source: str, settings: KafkaSettings) -> None:
    await post(settings, [letter_of(number, topic=source) for number in range(5)])
    everything = (await dlq.typed("list", "--json")).lines
    middle, last = everything[2], everything[4]

    since = await dlq.typed("list", "--json", "--since", last["at"])
    until = await dlq.typed("list", "--summary", "--json", "--until", "2020-01-01")
    future = await dlq.typed("list", "--summary", "--json", "--since", "2100-01-01")
    limited = await dlq.typed("list", "--json", "--limit", "2", "--since", "1h")
    one = await dlq.typed("replay", middle["place"], "--dry-run", "--json")
    nowhere = await dlq.typed("show", f"{source}.dlq:0:99")
    async with open_letter_box(settings) as box:
        (late,) = await box.stretches([Partition(f"{source}.dlq", 0)], datetime(2100, 1, 1, tzinfo=UTC))

    assert late.length == 0  # what is too old is not even read
    assert last in since.lines
    assert (until.json["letters"], future.json["letters"]) == (0, 0)
    assert limited.lines == everything[:2]
    assert (one.json["published"], one.json["dry_run"]) == (1, True)
    assert (nowhere.status, "its partition holds offsets 0 to 4" in nowhere.err) == (1, True)
    assert dlq.audit == []


async def test_where_no_letters_are_the_command_says_where_it_looked(dlq: Dlq, topic_prefix: str) -> None:
    anywhere = await dlq.typed("list")
    named = await dlq.typed("list", "--topic", "nothing")
    app = await dlq.typed("list", "--app", PLATFORM, "--summary", "--json")
    replayed = await dlq.typed("replay", "--yes", "--json")

    assert [each.status for each in (anywhere, named, app, replayed)] == [0, 2, 0, 0]
    assert (app.json["letters"], replayed.json["published"]) == (0, 0)
    assert "letters" not in anywhere.out
    assert anywhere.err.endswith("\n0 letters\n")
    assert anywhere.err.removesuffix("0 letters\n") in replayed.err
    assert f"no topic begins with {topic_prefix} and ends in .dlq" in anywhere.err
    assert 'no dead-letter topic "nothing.dlq"' in named.err
    assert f"none of {topic_prefix}order_placed.dlq is there" in app.err


async def test_letters_whose_topic_is_gone_are_left_out_and_no_topic_is_made(
    dlq: Dlq, kafka: Kafka, topic_prefix: str, settings: KafkaSettings
) -> None:
    await kafka.create_topics({f"{topic_prefix}gone.dlq": 1})
    await post(settings, [letter_of(1, topic=f"{topic_prefix}gone")])

    answers = [await dlq.typed("replay", "--yes", "--json") for _ in range(2)]

    assert [answer.json["left_out"] for answer in answers] == [{"no_topic": 1}] * 2


def on_a_terminal(dlq: Dlq, *arguments: str, answer: bytes) -> tuple[int, str]:
    """Type the command and, when it asks, `answer`; its status, and all that stood on the terminal."""
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
            if b"again? [y/N]" in seen and not is_asked:
                is_asked = True
                os.write(master, answer)
    os.close(master)
    return process.returncode, seen.decode()


async def test_on_a_terminal_it_counts_asks_and_does_what_is_answered(
    dlq: Dlq, source: str, settings: KafkaSettings
) -> None:
    await post(settings, [letter_of(number, topic=source) for number in range(3)])
    refused, asked = await dlq.typed("replay"), dlq.audit

    no = await asyncio.to_thread(on_a_terminal, dlq, "replay", answer=b"n\n")
    unchanged = dlq.audit
    yes = await asyncio.to_thread(on_a_terminal, dlq, "replay", "--limit", "2", answer=b"y\n")

    assert (refused.status, asked, unchanged) == (2, [], [])
    assert "nothing was changed: there is no terminal to ask on. Publish 3 letters again? Say --yes" in refused.err
    assert "nothing was changed" in no[1]
    assert (no[0], yes[0]) == (1, 0)
    assert "Publish 2 letters again?" in yes[1]
    assert "2 letters replayed" in yes[1]
    assert dlq.audit[-1]["counts"]["published"] == 2


async def test_what_is_piped_away_stays_whole_while_progress_is_on_the_terminal(
    dlq: Dlq, source: str, settings: KafkaSettings
) -> None:
    await post(settings, [letter_of(number, topic=source) for number in range(50)])

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


async def test_a_replay_that_is_cut_short_says_how_far_it_came_and_the_next_one_does_the_rest(
    own_kafka: KafkaBroker, topic_prefix: str, redis_url: str, tmp_path: Path
) -> None:
    count = 1_500
    patient, hasty = (
        dlq_for(own_kafka, topic_prefix, redis_url, temporary, more)
        for temporary, more in ((tmp_path, ""), (tmp_path / "hasty", "request_timeout_seconds = 2"))
    )
    source, settings = f"{topic_prefix}order_placed", kafka_settings(own_kafka, topic_prefix)
    await own_kafka.create_topics({source: 1, f"{source}.dlq": 1})
    await post(settings, (letter_of(number, topic=source, filling="x" * 8_000) for number in range(count)))

    async def in_the_middle(dlq: Dlq) -> asyncio.subprocess.Process:
        """A replay that has begun to publish."""
        async with open_letter_box(settings) as box:
            (before,) = await box.stretches([Partition(source, 0)])
            process = await dlq.start("replay", "--yes", "--json")
            while (await box.stretches([Partition(source, 0)]))[0].end == before.end:
                assert process.returncode is None, "it has ended"
        return process

    interrupted = await in_the_middle(patient)
    interrupted.send_signal(signal.SIGINT)
    _, told = await interrupted.communicate()
    first = patient.audit[-1]
    silent = await in_the_middle(hasty)
    os.kill(own_kafka.pid, signal.SIGSTOP)
    out, err = await silent.communicate()
    os.kill(own_kafka.pid, signal.SIGCONT)
    second = hasty.audit[-1]
    await asyncio.to_thread(own_kafka.wait_until_it_serves)
    last = await patient.typed("replay", "--yes", "--json")

    assert (interrupted.returncode, first["says"], b"interrupted" in told) == (130, "interrupted", True)
    assert silent.returncode == 1
    assert b"no answer from" in err or b"did not confirm" in out
    assert first["counts"]["published"] < count
    assert second["counts"]["published"] < count
    assert (last.status, last.json["published"]) == (0, count)
    assert await numbers_in(settings, source) == set(range(count))


async def numbers_in(settings: KafkaSettings, topic: str) -> set[int]:
    """The orders that stand in `topic`."""
    numbers: set[int] = set()
    async with open_letter_box(settings) as box:
        async for page in box.pages(await box.stretches([Partition(topic, 0)])):
            values: list[Any] = [letter.record.value for letter in page.letters]
            numbers |= {int(value.partition(b'"event_id":"event-')[2].partition(b'"')[0]) for value in values}
    return numbers


PAGE = (ROOT / "docs" / "how-to" / "replay-a-dead-letter.md").read_text(encoding="utf-8")
TYPED = [shlex.split(line)[2:] for line in PAGE.splitlines() if line.strip().startswith("integr8s-idem dlq ")]


async def test_what_the_page_types_can_be_typed(
    dlq: Dlq, source: str, settings: KafkaSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await post(settings, [letter_of(number, topic=source, error=NoSuchCardError("no")) for number in range(20)])
    monkeypatch.chdir(tmp_path)

    for words in TYPED:
        here = [word.replace("order_placed", source) for word in words]
        refused = {"replay": 2}.get(words[0], 0) if not {"--yes", "--dry-run"} & set(words) else 0

        answer = await dlq.typed(*here)

        assert answer.status == refused, answer
        assert ("there is no terminal to ask on" in answer.err) is bool(refused)
        assert "0 letters" not in answer.out.splitlines()

    assert len(TYPED) == 7
    assert (tmp_path / "letters.jsonl").read_text().count("\n") == 20


async def test_what_the_page_does_in_code_puts_a_letter_back(settings: KafkaSettings, source: str) -> None:
    page: dict[str, Any] = {}
    exec(compile(code_blocks(PAGE, "python")[0], "replay-a-dead-letter.md", "exec"), page)
    publisher, repository = EventPublisher(settings), MemoryIdempotencyRepository()
    manager = IdempotencyManager(repository=repository, scope="billing")

    history = await page["put_back"](letter_of(5, topic=source), Settings(kafka=settings), publisher, manager)
    await publisher.close()

    assert history == {}
    assert await numbers_in(settings, source) == {5}
