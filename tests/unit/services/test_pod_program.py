"""The program that stands before the script in a pod, run as the cluster would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.events import CreatePodCommand
from services.k8s_worker.job_spec import job_of
from services.settings import PlatformSection
from tests.support.conditions import eventually


@contextmanager
def started(folder: Path, script: str, *, before: str = "", **fields: object) -> Iterator[subprocess.Popen[str]]:
    """The container's command in `folder`, with its environment and no other; `before` runs before its program."""
    command = CreatePodCommand.model_validate({"execution_id": "e1", "saga_id": "s1", "script": script, **fields})
    settings = PlatformSection(output_limit_bytes=100, output_flood_bytes=100_000, max_open_files=20)
    (container,) = job_of("exec-1", command, settings)["spec"]["template"]["spec"]["containers"]
    *options, text = container["command"][1:]
    program = subprocess.Popen(
        [sys.executable, *options, f"{before}\nexec({text!r})" if before else text, str(folder.parent / "report")],
        cwd=folder,
        env={each["name"]: each["value"] for each in container["env"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def ended(folder: Path, script: str, *, before: str = "", **fields: object) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and report."""
    with started(folder, script, before=before, **fields) as program:
        output, _ = program.communicate(timeout=60)
        return program.returncode, output, json.loads((folder.parent / "report").read_text())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def test_it_ends_as_its_script(folder: Path) -> None:
    status, output, report = ended(folder, "print('a'); raise SystemExit(3)")

    assert (status, output) == (3, "a\n")
    assert (report["end"], report["exit_code"], report["dropped"]) == ("exited", 3, 0)


HELD_UP = """
import os, subprocess

class HeldUp(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

subprocess.Popen = HeldUp
"""
"""Goes on when what it has started has ended already, as on a machine that is busy elsewhere."""


def test_a_script_that_has_already_ended_is_reported(folder: Path) -> None:
    status, output, report = ended(folder, "print('a')", before=HELD_UP, timeout_seconds=5)

    assert (status, output, report["end"]) == (0, "a\n", "exited")


def test_a_signal_is_reported_like_a_shell_does(folder: Path) -> None:
    status, _, report = ended(folder, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")

    assert (status, report["exit_code"]) == (137, -9)


def test_the_clock_on_the_wall_ends_it(folder: Path) -> None:
    status, output, report = ended(folder, "import time; print('a'); time.sleep(600)", timeout_seconds=0.5)

    assert (status, output, report["end"]) == (137, "a\n", "timed_out")


def test_output_beyond_the_limit_is_counted(folder: Path) -> None:
    _, output, report = ended(folder, "print('x' * 500, end='')")

    assert (output, report["dropped"]) == ("x" * 100, 400)


def test_a_flood_ends_it(folder: Path) -> None:
    _, output, report = ended(folder, "while True: print('x' * 1_000)", timeout_seconds=60)

    assert (len(output), report["end"]) == (100, "flooded")


HOLD_FILES = """
files = []
try:
    while True:
        files.append(open("main.py"))
except OSError as error:
    print(len(files) < 20, error.strerror)
"""


def test_limits_of_the_system_are_held(folder: Path) -> None:
    assert ended(folder, HOLD_FILES)[1] == "True Too many open files\n"


async def test_asked_to_end_it_ends_its_script_first(folder: Path) -> None:
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with started(folder, script) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.send_signal(signal.SIGTERM)

        assert program.wait(30) == 137
        assert not psutil.pid_exists(pid)
    assert json.loads((folder.parent / "report").read_text())["end"] == "terminated"


async def test_descendants_of_the_script_end_with_it(folder: Path) -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"

    _, output, report = ended(folder, script)

    assert report["end"] == "exited"
    await eventually(lambda: not psutil.pid_exists(int(output)) or psutil.Process(int(output)).status() == "zombie")


def test_an_escaped_process_does_not_keep_the_output_open(folder: Path) -> None:
    """In a container, all processes end with the first."""
    script = "import subprocess; print(subprocess.Popen(['sleep', '5'], start_new_session=True).pid)"

    _, output, report = ended(folder, script)

    assert report["end"] == "exited"
    assert report["wall_seconds"] < 5
    os.kill(int(output), signal.SIGKILL)
