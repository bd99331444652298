"""Commands that are started with closed standard streams, as by `<&-` in a shell or by some process managers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError

import pytest

from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.stores.factory import open_store
from integr8s_idem.testing.store_under_test import wish
from tests.support.conditions import wait_until
from tests.support.ports import reserve_port
from tests.support.processes import ServiceProcess
from tests.support.supervised import supervised

PROGRAM = [sys.executable, "-m", "integr8s_idem"]
CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.fixture
def port() -> int:
    return reserve_port()


@pytest.fixture
def settings(tmp_path: Path, port: int) -> Path:
    """Return settings for a broker that does not answer."""
    file = tmp_path / "settings.toml"
    file.write_text(
        f'[kafka]\nbootstrap_servers = "127.0.0.1:{reserve_port()}"\n'
        f'[store]\nkind = "sqlite"\npath = "{tmp_path}/records.db"\n'
        f"[telemetry]\nmetrics_port = {port}\n"
    )
    return file


def health(port: int) -> str:
    """Return the body of the probe; empty if nothing listens."""
    with suppress(HTTPError, OSError):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            with error:
                return str(error.read().decode())
    return ""


def run(command: list[str], closed: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh"]
    return subprocess.run([*shell, *command], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("closed", CLOSED)
def test_a_worker_with_closed_streams_drains_and_exits_with_status_0(
    closed: str, settings: Path, port: int, tmp_path: Path
) -> None:
    arguments = ("tests.support.shop:platform", "--settings", str(settings), "--json")
    with ServiceProcess(*arguments, log=tmp_path / "log", closed=closed) as worker:
        wait_until(lambda: "cannot reach Kafka" in health(port), state=lambda: worker.output)
        worker.terminate()

        assert worker.wait() == 0, worker.output


@pytest.mark.slow
@pytest.mark.parametrize("closed", CLOSED)
def test_a_supervisor_with_closed_streams_starts_its_workers_and_exits_with_status_0(
    closed: str, settings: Path, port: int, tmp_path: Path
) -> None:
    arguments = ("tests.support.shop:platform", "--settings", str(settings), "--json", "--processes", "2")
    with supervised(*arguments, log=tmp_path / "log", closed=closed) as supervisor:
        wait_until(lambda: health(port).count("cannot reach Kafka") >= 2, state=lambda: supervisor.output)
        supervisor.terminate()

        assert supervisor.wait() == 0, supervisor.output


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
async def test_a_command_with_closed_streams_that_needs_a_confirmation_exits_with_status_2(
    closed: str, settings: Path, tmp_path: Path
) -> None:
    store_settings = SqliteStoreSettings(kind="sqlite", path=str(tmp_path / "records.db"))
    async with open_store(store_settings, key_prefix="idempotency") as store:
        await store.reserve([wish("idempotency:billing:order:7")])

    purge = ["keys", "purge", "--all", "--in-progress", "--settings", str(settings)]
    answer = await asyncio.to_thread(run, [*PROGRAM, *purge], closed)

    assert answer.returncode == 2, answer.stderr
    assert answer.stdout == ""
    if "2>&-" not in closed:
        assert "no terminal to ask for confirmation" in answer.stderr


def test_the_results_of_a_command_without_standard_output_are_discarded(settings: Path) -> None:
    answer = run([*PROGRAM, "settings", "check", "--settings", str(settings)], ">&-")

    assert (answer.returncode, answer.stderr) == (0, "")


OPENED = """
import json, os, sys
import integr8s_idem, integr8s_idem.cli
before = [sys.stdin, sys.stdout, sys.stderr]
from integr8s_idem.cli.standard_streams import open_missing_streams
open_missing_streams()
open_missing_streams()
here = os.open(".", os.O_RDONLY)
with open("found.json", "w") as file:
    found = {
        "before": [stream is None for stream in before],
        "terminals": [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "null": [os.path.sameopenfile(fd, os.open(os.devnull, os.O_RDONLY)) for fd in range(3)],
        "inherited": [os.get_inheritable(fd) for fd in range(3)],
        "read": sys.stdin.read(),
        "next": here > 2,
    }
    print("\\udcff")
    print("\\udcff", file=sys.stderr)
    json.dump(found, file)
"""


def test_missing_streams_are_opened_on_dev_null_once(tmp_path: Path) -> None:
    run([sys.executable, "-c", OPENED], "<&- >&- 2>&-", folder=tmp_path)

    assert json.loads((tmp_path / "found.json").read_text()) == {
        "before": [True] * 3,
        "terminals": [False] * 3,
        "null": [True] * 3,
        "inherited": [True] * 3,
        "read": "",
        "next": True,
    }
