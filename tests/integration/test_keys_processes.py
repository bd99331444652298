"""`integr8s-idem keys` as a process, with and without a terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from integr8s_idem import IdempotencyManager
from integr8s_idem.records import Reserved
from tests.operations.scale import Run, fill, measured
from tests.support.keys_desk import Desk
from tests.support.redis import RedisServer
from tests.support.terminal import Terminal

LIMIT_MB = 150
FEW, MANY = 500, 20_000


@pytest.fixture
def desk(tmp_path: Path, redis_url: str) -> Desk:
    desk = Desk(tmp_path, f'kind = "redis"\nurl = "{redis_url}"')
    desk.fill()
    return desk


def ran(
    desk: Desk, *arguments: str, output: IO[str] | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "integr8s_idem", "keys", *arguments],
        cwd=desk.folder,
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="backslashreplace",
        timeout=60,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XDG_STATE_HOME": str(desk.folder / "state"),
            **(env or {}),
        },
    )


def on_terminal(
    desk: Desk, *arguments: str, output: Path | None = None, env: Mapping[str, str] | None = None
) -> Terminal:
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "XDG_STATE_HOME": str(desk.folder / "state"), **(env or {})}
    return Terminal("keys", *arguments, folder=desk.folder, env=environment, output=output)


def audited(desk: Desk) -> list[str]:
    file = desk.folder / "state" / "integr8s-idem" / "audit.jsonl"
    return [json.loads(line)["says"] for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("list",), 0, "failed\t"),
        (("show", "held"), 0, "owner               billing@host-7"),
        (("explain", "order_placed:2"), 0, "error          no such account"),
        (("release", "held", "--yes", "--force"), 0, "released: 1 record (billing: 1 processing)"),
        (("purge", "--status", "failed", "--yes"), 0, "purged: 1 record (billing: 1 failed)"),
    ],
)
def test_each_command_works_in_a_pipe(desk: Desk, arguments: Sequence[str], status: int, text: str) -> None:
    answer = ran(desk, *arguments)

    assert (answer.returncode, text in answer.stdout) == (status, True), answer
    assert "\x1b" not in answer.stdout + answer.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_characters_that_the_output_cannot_encode_are_escaped(desk: Desk, encoding: str) -> None:
    desk.take("ü€")

    answer = ran(desk, "show", "idempotency:billing::%C3%BC%E2%82%AC", env={"PYTHONIOENCODING": encoding})

    assert (answer.returncode, answer.stderr) == (0, "")
    assert "u20ac\n" in answer.stdout.partition("value")[2]


def test_without_a_terminal_confirmation_is_required(desk: Desk) -> None:
    answer = ran(desk, "purge", "--all")

    assert answer.returncode == 2
    assert "Use --yes to confirm" in answer.stderr
    assert len(desk.labels()) == 5
    assert audited(desk) == []


def test_records_are_purged_after_confirmation(desk: Desk) -> None:
    with on_terminal(desk, "purge", "--status", "failed") as terminal:
        terminal.wait_for("Delete 1 record (billing: 1 failed)? Their events are handled again")
        assert len(desk.labels()) == 5
        terminal.enter("y\n")
        assert terminal.wait() == 0

    assert "purged: 1 record" in terminal.said
    assert "order_placed:2" not in desk.labels()
    assert audited(desk) == ["begun", "ended"]


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04", None], ids=["no", "enter", "end", "interrupt"])
def test_nothing_is_released_without_confirmation(desk: Desk, answer: str | None) -> None:
    with on_terminal(desk, "release", "held", "--force") as terminal:
        terminal.wait_for("may do the same work.")
        terminal.wait_for("[y/N]")
        if answer is None:
            terminal.wait_for_sleep()
            terminal.interrupt()
        else:
            terminal.enter(answer)
        assert terminal.wait() == 1

    assert "nothing was changed" in terminal.said
    assert next(one for one in desk.json_lines("list") if one["label"] == "held")["lease"] == "held"
    assert audited(desk) == []


def test_a_terminal_shows_a_table_and_a_panel(desk: Desk) -> None:
    with on_terminal(desk, "list") as terminal:
        assert terminal.wait() == 0
    assert "status     age        tries details" in terminal.said
    assert "5 records (billing: 1 completed, 1 failed, 3 processing)" in terminal.said

    with on_terminal(desk, "explain", "order_placed:1") as terminal:
        assert terminal.wait() == 0
    assert "─ order_placed:1: completed ─" in terminal.said
    assert "next delivery" in terminal.said


def test_keys_are_not_truncated_on_narrow_terminals(desk: Desk) -> None:
    with on_terminal(desk, "list", env={"COLUMNS": "60"}) as terminal:
        assert terminal.wait() == 0

    assert {one["key"] for one in desk.json_lines("list")} == set(re.findall(r"idempotency:billing:\S+", terminal.said))


def test_a_full_disk_is_reported_on_one_line(desk: Desk) -> None:
    with Path("/dev/full").open("w") as full:
        answer = ran(desk, "list", output=full)

    assert (answer.returncode, answer.stderr) == (1, "cannot write to standard output: No space left on device\n")


def test_progress_does_not_mix_with_piped_output(desk: Desk) -> None:
    output = desk.folder / "records.jsonl"
    with on_terminal(desk, "list", "--json", output=output) as terminal:
        assert terminal.wait() == 0

    assert len([json.loads(line) for line in output.read_text().splitlines()]) == 5
    assert "order_placed" not in terminal.said


def test_a_list_ends_when_its_reader_closes_the_pipe(desk: Desk) -> None:
    _many(desk, 5_000)
    listing = subprocess.Popen(
        [sys.executable, "-m", "integr8s_idem", "keys", "list", "--json"],
        cwd=desk.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert listing.stdout is not None
    assert listing.stderr is not None
    with listing:
        assert json.loads(listing.stdout.readline())["service"] == "billing"
        listing.stdout.close()
        assert listing.wait(timeout=60) == 0
        assert listing.stderr.read() == b""


def test_ctrl_c_ends_a_list_without_a_traceback(tmp_path: Path) -> None:
    with RedisServer(tcp=True) as server:
        desk = Desk(tmp_path, f'kind = "redis"\nurl = "{server.url}"\ntimeout_seconds = 60')
        server.pause()
        with on_terminal(desk, "list") as terminal:
            terminal.wait_for_connection(server.port)
            terminal.interrupt()
            assert terminal.wait() == 130
        server.resume()

    assert "interrupted" in terminal.said
    assert "Traceback" not in terminal.said


def test_an_interrupted_purge_is_recorded_in_the_audit_file(tmp_path: Path) -> None:
    with RedisServer(tcp=True) as server:
        desk = Desk(tmp_path, f'kind = "redis"\nurl = "{server.url}"\ntimeout_seconds = 60')
        desk.fill()
        with on_terminal(desk, "purge", "--all") as terminal:
            terminal.wait_for("[y/N]")
            server.pause()
            terminal.enter("y\n")
            terminal.wait_for_connection(server.port)
            terminal.interrupt()
            assert terminal.wait() == 130
        server.resume()
        assert len(desk.labels()) == 5

    assert audited(desk) == ["begun", "interrupted"]


def test_memory_does_not_grow_with_the_store_and_one_key_takes_seconds(tmp_path: Path) -> None:
    few, many = filled(tmp_path / "few", FEW, "list"), filled(tmp_path / "many", MANY)

    assert {run.status for run in many.values()} == {0}
    assert (few["list"].lines, many["list"].lines) == (FEW, MANY)
    assert json.loads(many["purge failed"].output)["purged"] == MANY // 10
    by_key, by_id = many["explain by key"], many["explain by event id"]
    assert by_key.output.splitlines()[:2] == by_id.output.splitlines()[:2]
    assert by_key.output.splitlines()[0].endswith(b": completed")
    assert max(by_key.seconds, by_id.seconds) < 30
    assert max(run.peak_mb for run in many.values()) < LIMIT_MB
    # Forty times as many records would exceed this limit if they were all in memory.
    assert many["list"].peak_mb < few["list"].peak_mb + 10


def filled(folder: Path, records: int, *only: str) -> dict[str, Run]:
    """Measure the commands on a store with `records` records."""
    folder.mkdir()
    with RedisServer() as server:
        asyncio.run(fill(server, records))
        return measured(server, records, folder, only)


def _many(desk: Desk, records: int) -> None:
    async def reserve(manager: IdempotencyManager) -> None:
        verdicts = await manager.reserve_many([f"many:{number}" for number in range(records)])
        assert all(isinstance(verdict, Reserved) for verdict in verdicts)

    desk.manage(reserve)
