"""`make demo`: on embedded servers, on real servers, and its messages when something fails."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.demo.duplicator import Duplicator
from examples.demo.journal import Journal
from examples.demo.metrics import Metrics
from examples.demo.requests import FILE, DemoRequest, as_events, read_requests
from examples.demo.verdict import Seen, Verdict
from integr8s_idem.config import KafkaSettings
from integr8s_idem.embedded import EmbeddedKafka
from integr8s_idem.worker import EventPublisher
from integr8s_idem.worker.consumer import make_consumer
from services.events import PodCreated
from tests.support.conditions import eventually
from tests.support.kafka import Kafka
from tests.support.redis import RedisServer

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-W", "error", "-m", "examples.demo")
KEYS = {"requested", "deliveries", "duplicates_blocked", "executed_once", "reruns_after_kill", "results_stored", "lost"}


class Demo:
    """`python -m examples.demo` as a process, with its own temporary folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        # A short path for a socket, accessible to the user that runs the embedded PostgreSQL.
        self.folder = Path(tempfile.mkdtemp(prefix="demo-"))
        self.folder.chmod(0o711)
        self.left_behind: list[str] = []
        """Files and processes that remain after the demo."""
        self._verdict = folder / "verdict.json"
        self._output = folder / "output.txt"
        with self._output.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "--json", str(self._verdict), "--deadline", "80", *arguments],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.folder), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._verdict.read_text())
        return found

    def remains(self) -> list[str]:
        """Return files in the folder, and processes whose command contains its path."""
        commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
        return [*map(str, self.folder.iterdir()), *(command for command in commands if str(self.folder) in command)]

    async def wait_for_output(self, text: str) -> None:
        await eventually(lambda: text in self.output or self.process.poll() is not None, state=lambda: self.output)
        assert text in self.output, self.output

    def exits_with(self, status: int) -> None:
        assert self.process.wait(110) == status, self.output


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[Demo]:
    started = Demo(folder, *arguments)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
            started.process.wait(30)
        started.left_behind = started.remains()
        shutil.rmtree(started.folder)


@pytest.fixture
def requests_file(tmp_path: Path) -> Path:
    """Forty requests, including one of each kind."""
    sleep = {"script": "import time; time.sleep(0.7); print('slept')"}
    kinds: dict[int, dict[str, object]] = {
        3: {"script": "raise SystemExit(1)"},
        5: {"script": "import time; time.sleep(60)", "timeout_seconds": 2},
        7: {"script": "puts 1", "language": "ruby"},
    }
    lines = [
        {"user_id": f"user {n % 5}", "priority": n % 11, **kinds.get(n, sleep if n % 2 else {"script": f"print({n})"})}
        for n in range(40)
    ]
    file = tmp_path / "requests_file.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def assert_passed(verdict: dict[str, Any]) -> None:
    assert verdict.keys() >= KEYS
    assert verdict["faults"] == []
    assert (verdict["requested"], verdict["results_stored"], verdict["lost"]) == (40, 40, 0)
    assert verdict["results_by_status"] == {"completed": 37, "failed": 2, "timeout": 1}
    assert verdict["reruns_after_kill"] >= 1
    assert verdict["executed_once"] == 39 - verdict["reruns_after_kill"]
    assert verdict["delivered_twice"] == verdict["events"] // 3 == 80
    assert verdict["duplicates_blocked"] > 20


@pytest.mark.slow
def test_every_request_has_one_result_despite_duplicates_and_a_killed_worker(
    tmp_path: Path, requests_file: Path
) -> None:
    with demo(tmp_path, "--requests", str(requests_file)) as running:
        running.exits_with(0)

    assert_passed(running.verdict)
    assert running.verdict["broker"] == "embedded Kafka (emulator)"
    assert running.left_behind == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "named"), [("sqlite", "SQLite"), ("postgresql", "PostgreSQL")])
def test_the_demo_can_keep_its_records_in_the_database_of_the_results(
    tmp_path: Path, requests_file: Path, kind: str, named: str
) -> None:
    with demo(tmp_path, "--requests", str(requests_file), "--store", kind) as running:
        running.exits_with(0)

    assert_passed(running.verdict)
    assert running.verdict["store"] == f"embedded {named}"
    assert running.left_behind == []


@pytest.mark.slow
@pytest.mark.kafka
async def test_the_demo_runs_on_real_servers_with_other_settings(
    tmp_path: Path, requests_file: Path, kafka: Kafka, topic_prefix: str
) -> None:
    settings = tmp_path / "settings.toml"
    with RedisServer(tcp=True) as redis:
        settings.write_text(
            f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\ntopic_prefix = "{topic_prefix}"\n'
            f'[store]\nurl = "{redis.url}"\n'
        )
        with demo(tmp_path, "--requests", str(requests_file), "--settings", str(settings)) as running:
            await asyncio.to_thread(running.exits_with, 0)
        async with redis.client() as client:
            keys = await client.dbsize()

    assert_passed(running.verdict)
    assert running.verdict["broker"] == f"Kafka at {kafka.bootstrap}"
    assert (keys, running.left_behind) == (0, [])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
async def test_a_stopped_demo_leaves_no_files_or_processes(
    tmp_path: Path, requests_file: Path, number: signal.Signals
) -> None:
    with demo(tmp_path, "--requests", str(requests_file)) as running:
        await running.wait_for_output("requests are published")
        running.process.send_signal(number)
        running.exits_with(128 + number)

    assert running.left_behind == []


@pytest.mark.slow
async def test_the_demo_exits_with_the_log_of_a_service_that_dies(tmp_path: Path, requests_file: Path) -> None:
    with demo(tmp_path, "--requests", str(requests_file)) as running:
        await running.wait_for_output("requests are published")
        children = psutil.Process(running.process.pid).children()
        next(child for child in children if "coordinator" in child.cmdline()).kill()
        running.exits_with(2)

    assert "coordinator has ended; its last log lines:\n" in running.output
    assert running.left_behind == []


def test_the_demo_exits_at_once_without_a_broker_and_shows_no_password(tmp_path: Path, requests_file: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text('[kafka]\nbootstrap_servers = "127.0.0.1:1"\n[store]\nurl = "redis://:secret@127.0.0.1:1"\n')

    with demo(tmp_path, "--requests", str(requests_file), "--settings", str(settings)) as running:
        running.exits_with(2)

    assert "no verdict: Kafka at 127.0.0.1:1 does not answer" in running.output
    assert "secret" not in running.output
    assert running.left_behind == []


def seen(**changes: Any) -> Seen:
    """Return three requests: one ran once, one was in flight at the kill and ran twice, one cannot run."""
    usual: dict[str, Any] = {
        "requested": ["a", "b", "c"],
        "runs": {"a": 1, "b": 2},
        "results": {"a": ["completed"], "b": ["timeout"], "c": ["failed"]},
        "in_flight": ["b"],
        "attempts": {"a": 1, "b": 2, "c": 1},
        "events": 18,
        "copies": 6,
    }
    return Seen(**usual | changes)


def test_a_rerun_of_an_execution_in_flight_at_the_kill_is_accepted() -> None:
    verdict = Verdict(seen())

    assert verdict.good, verdict.faults
    assert (verdict.executed_once, verdict.reruns_after_kill, verdict.lost) == (["a"], ["b"], [])


def test_unfinished_requests_are_not_reported_as_lost() -> None:
    verdict = Verdict(seen(results={"a": ["completed"], "b": ["failed"]}, over=False))

    assert (verdict.lost, verdict.unfinished) == ([], ["c"])
    assert verdict.faults == ["1 not finished at the deadline: c"]
    assert (verdict.numbers()["lost"], verdict.numbers()["unfinished"]) == (0, 1)
    assert "lost        0; 1 were not finished at the deadline" in verdict.lines()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"runs": {"a": 2, "b": 2}}, "1 run again, but not in flight at the kill: a"),
        ({"runs": {"a": 1, "b": 3}, "attempts": {"b": 3}}, "1 run more than twice: b"),
        ({"attempts": {"b": 1}}, "1 run twice, but not reported as attempt 2: b"),
        ({"results": {"a": ["completed"], "b": ["failed"]}}, "1 without a stored result: c"),
        (
            {"results": {"a": ["completed"] * 2, "b": ["failed"], "c": ["failed"]}},
            "1 with more than one stored result: a",
        ),
        ({"requested": ["a", "b"]}, "1 with a result, but not requested: c"),
        ({"runs": {"a": 1, "b": 2, "x": 1}}, "1 run, but not requested: x"),
        ({"runs": {"b": 2}}, "1 completed without a run: a"),
        ({"killed": False}, "no worker was killed while a script ran"),
        ({"copies": 5}, "only 5 of 18 events were delivered twice, not a third"),
        ({"troubles": ["not finished after 110 s"]}, "not finished after 110 s"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_verdict_reports_the_fault(changes: dict[str, Any], fault: str) -> None:
    verdict = Verdict(seen(**changes))

    assert not verdict.good
    assert verdict.faults == [fault]


def test_the_requests_file_has_hundreds_of_requests_of_every_kind() -> None:
    requests = read_requests(FILE)

    assert len(requests) >= 200
    assert len({request.user_id for request in requests}) > 5
    assert len({request.priority for request in requests}) == 11
    assert sum(request.language != "python" for request in requests) >= 2
    assert sum(request.timeout_seconds < 5 for request in requests) >= 5


def test_a_script_writes_its_journal_line_first_and_needs_no_environment(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a journal")
    requests = [DemoRequest(script="print('fine')"), DemoRequest(script="raise SystemExit(3)")]
    first, second = (event.script for event in as_events(requests, "run", journal))

    for script in (first, second, first):
        subprocess.run([sys.executable, "-I", "-c", script], env={}, cwd=tmp_path, capture_output=True, check=False)

    assert journal.runs() == {"run-001": 2, "run-002": 1}


async def test_every_third_event_is_delivered_twice_byte_for_byte() -> None:
    async with EmbeddedKafka() as broker:
        kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
        duplicator = Duplicator(kafka, "doubling", ("pod_created",))
        publisher = EventPublisher(kafka)
        doubling = asyncio.create_task(duplicator.run())
        await publisher.publish(*(PodCreated(execution_id=f"e{number}", pod_name="pod") for number in range(12)))
        await eventually(lambda: duplicator.copies == 4 or doubling.done())
        # After the copies on the topic: if it had copied them, it would have seen more events by now.
        await publisher.publish(PodCreated(execution_id="last", pod_name="pod"))
        await eventually(lambda: duplicator.events >= 13 or doubling.done())
        messages = [] if doubling.done() else await _all_of("pod_created", kafka, 17)
        doubling.cancel()
        await asyncio.wait({doubling})
        await publisher.close()

    assert doubling.cancelled(), doubling.exception()
    assert Counter(Counter(messages).values()) == {1: 9, 2: 4}


async def _all_of(topic: str, kafka: KafkaSettings, count: int) -> list[tuple[object, ...]]:
    consumer = make_consumer(kafka, "reading")
    consumer.subscribe([topic], listener=None)
    await consumer.start()
    messages: list[tuple[object, ...]] = []
    while len(messages) < count:
        batches = await consumer.getmany(timeout_ms=100, max_records=100)
        messages += [(r.key, r.value, tuple(r.headers)) for records in batches.values() for r in records]
    await consumer.stop()
    return messages


async def test_counts_of_a_dead_process_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 'idempotency_takeovers_total{service="s",event_type="e"} 2.0\nidempotency_in_flight{service="s"} 3.0\n'
    monkeypatch.setattr("examples.demo.metrics._get", lambda port, path: (200, page))
    metrics = Metrics()

    await metrics.scrape("s", 1)
    metrics.died("s")
    left = metrics["in_flight"]
    await metrics.scrape("s", 1)

    assert (metrics["takeovers"], left, metrics["in_flight"]) == (4, 0, 3)
