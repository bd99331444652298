"""Scripts: limits, visibility and rights of child processes of the k8s worker."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from integr8s_idem.engine.work import Attempt
from integr8s_idem.errors import ApplicationError, SettingsError
from services.database import Database
from services.events import CreatePodCommand
from services.k8s_worker import supervisor
from services.k8s_worker.privileges import hidden_process
from services.k8s_worker.runner import Run, RunEnd, Runner
from services.k8s_worker.runners import chosen_runner
from services.k8s_worker.worker import PodWorker
from services.settings import PlatformSection
from tests.packaging.repository import ROOT
from tests.platform.conftest import RecordingPublisher
from tests.support.conditions import wait_until

pytestmark = pytest.mark.scenario(135)

SYSTEM_PYTHON = "/usr/bin/python3"
"""A Python that every user can run."""

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or not Path(SYSTEM_PYTHON).exists(),
    reason=f"root alone can become another user, who needs {SYSTEM_PYTHON}",
)
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc exists on Linux only")


def command(script: str = "print('ran')", **limits: Any) -> CreatePodCommand:
    return CreatePodCommand.model_validate({"execution_id": "e1", "saga_id": "s1", "script": script} | limits)


async def run(script: str, **settings: Any) -> Run:
    section = PlatformSection(runner="subprocess", **settings)
    async with chosen_runner(section) as runner:
        return await runner.run("pod", command(script), asyncio.Event())


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/platform.db")
    await database.open()
    yield database
    await database.close()


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"cpu_limit": 4.5}, "cpu_limit is 4.5; the maximum is 4"),
        ({"memory_limit_mb": 2_049}, "memory_limit_mb is 2049; the maximum is 2048"),
        ({"timeout_seconds": 301}, "timeout_seconds is 301; the maximum is 300"),
    ],
    ids=["cores", "memory", "time"],
)
async def test_a_command_sent_directly_to_the_worker_is_limited_too(
    database: Database, limits: dict[str, Any], error: str
) -> None:
    class Never:
        async def run(self, pod_name: str, command: CreatePodCommand, stop: asyncio.Event) -> Run:
            raise AssertionError("the script was run")

        async def discard(self, pod_name: str) -> None:
            pass

    runner: Runner = Never()
    worker = PodWorker(database, PlatformSection(), runner, RecordingPublisher())
    attempt = Attempt("key", 1, 1, asyncio.get_running_loop().time() + 60, "label", 0)
    outcome: Any = await worker.create(command(**limits), attempt)
    assert (outcome.event_type, outcome.error_type, outcome.stderr) == ("execution_failed", "limit_exceeded", error)


async def test_a_runner_must_be_configured() -> None:
    with pytest.raises(SettingsError, match=r"(?s)platform\.runner.*without a sandbox"):
        async with chosen_runner(PlatformSection()):
            pass


async def test_the_subprocess_runner_warns_once_that_it_is_not_a_sandbox(caplog: pytest.LogCaptureFixture) -> None:
    async with chosen_runner(PlatformSection(runner="subprocess", scripts_as_root=True)) as runner:
        for _ in range(2):
            assert (await runner.run("pod", command(), asyncio.Event())).stdout == "ran\n"
    warned = [record for record in caplog.records if "without a sandbox" in record.message]
    assert [record.levelno for record in warned] == [logging.WARNING]


WHO = """
import json, os
print(json.dumps([os.getuid(), os.geteuid(), os.getgid(), os.getgroups(), os.access("/", os.W_OK)]))
open("written", "w").write("its folder is its own")
"""


@as_root
async def test_scripts_of_a_worker_that_is_root_run_as_another_user() -> None:
    ran = await run(WHO, interpreter=SYSTEM_PYTHON)
    assert (ran.end, ran.exit_code, ran.stderr) == (RunEnd.EXITED, 0, "")
    assert json.loads(ran.stdout) == [65_532, 65_532, 65_532, [], False]
    assert json.loads((await run(WHO, interpreter=SYSTEM_PYTHON, subprocess_user_id=1_234)).stdout)[0] == 1_234


@as_root
async def test_scripts_run_as_root_only_if_configured(caplog: pytest.LogCaptureFixture) -> None:
    assert json.loads((await run(WHO, scripts_as_root=True)).stdout)[0] == 0
    assert "scripts_as_root" in caplog.text


@as_root
async def test_a_worker_as_root_does_not_start_if_scripts_cannot_run(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python"
    python.symlink_to(SYSTEM_PYTHON)
    with pytest.raises(ApplicationError, match=r"user 65532.*cannot run .*scripts_as_root"):
        await run(WHO, interpreter=str(python))


@linux
@as_root
def test_a_script_of_another_user_ends_with_its_supervisor(tmp_path: Path) -> None:
    """Changing the user clears the parent-death signal, which must be set again."""
    readable, report = os.pipe()
    spec = {"folder": str(tmp_path), "user": 65_532, "command": ["/bin/sleep", "600"], "limits": {}, "report": report}
    with (
        os.fdopen(readable) as output,
        subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(spec)],
            stdin=subprocess.PIPE,
            pass_fds=[report],
        ) as running,
    ):
        os.close(report)
        script = psutil.Process(int(output.readline()))
        wait_until(lambda: script.name() == "sleep")
        assert script.uids().effective == 65_532
        running.kill()
        script.wait(30)


@linux
async def test_a_script_cannot_gain_privileges() -> None:
    ran = await run("print([line for line in open('/proc/self/status') if 'NoNewPrivs' in line])", scripts_as_root=True)
    assert ran.stdout == "['NoNewPrivs:\\t1\\n']\n"


LOOK = """
import os
def read(pid, name):
    try:
        return open(f"/proc/{pid}/{name}", "rb").read(4096).decode(errors="replace")
    except OSError as error:
        return type(error).__name__
supervisor = os.getppid()
worker = int(open(f"/proc/{supervisor}/stat").read().rpartition(")")[2].split()[1])
print(read(supervisor, "environ"), read(worker, "environ"), read(worker, "maps")[:20], "SECRET" in os.environ)
"""


NO_ROOT = """
import asyncio, ctypes, os, sys

from services.events import CreatePodCommand
from services.k8s_worker import subprocess_runner, supervisor
from services.k8s_worker.runners import chosen_runner
from services.settings import PlatformSection

user, sys.executable, script = 65_532, sys.argv[1], sys.argv[2]
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable, like a process that was never root


async def main():
    async with chosen_runner(PlatformSection(runner="subprocess")) as runner:
        command = CreatePodCommand(execution_id="e", saga_id="s", script=script)
        print((await runner.run("pod", command, asyncio.Event())).stdout)


asyncio.run(main())
"""


@linux
@as_root
def test_a_script_cannot_read_a_worker_of_the_same_user() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", NO_ROOT, SYSTEM_PYTHON, LOOK],
        cwd=ROOT,
        env={"SECRET": "hunter2"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "PermissionError PermissionError PermissionError False\n\n", ran.stderr


@linux
def test_the_worker_is_not_dumpable_while_it_has_a_runner() -> None:
    owner = Path("/proc/self/environ").stat().st_uid
    with hidden_process():
        assert Path("/proc/self/environ").stat().st_uid == 0
    assert Path("/proc/self/environ").stat().st_uid == owner
