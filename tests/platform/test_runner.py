from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.events import CreatePodCommand
from services.k8s_worker.runner import Run, RunEnd, UnsupportedLanguageError
from services.k8s_worker.subprocess_runner import SubprocessRunner
from services.settings import PlatformSection

FORK_AWAY = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({pid_file!r}, "w").write(str(os.getpid()) + "\\n")
        time.sleep(600)
    time.sleep(600)
while not os.path.exists({pid_file!r}) or not open({pid_file!r}).read().endswith("\\n"):
    time.sleep(0.01)
"""

RUN_AND_WAIT = """
import asyncio, sys
from services.events import CreatePodCommand
from services.k8s_worker.subprocess_runner import SubprocessRunner
from services.settings import PlatformSection

command = CreatePodCommand(execution_id="e1", saga_id="s1", script=sys.argv[2], timeout_seconds=600)
settings = PlatformSection(work_folder=sys.argv[1], scripts_as_root=True)
asyncio.run(SubprocessRunner(settings).run("pod", command, asyncio.Event()))
"""


@pytest.fixture
def runner(settings: PlatformSection) -> SubprocessRunner:
    return SubprocessRunner(settings)


async def run(runner: SubprocessRunner, script: str, *, stop: asyncio.Event | None = None, **limits: object) -> Run:
    command = CreatePodCommand.model_validate({"execution_id": "e1", "saga_id": "s1", "script": script} | limits)
    return await runner.run("pod", command, stop or asyncio.Event())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # another process makes it true
            await asyncio.sleep(0.01)


def folders(parent: Path) -> list[Path]:
    return list(parent.glob("pod-*"))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def test_a_run_returns_output_and_resource_usage(runner: SubprocessRunner) -> None:
    script = "import sys; x = bytearray(40_000_000); print('out'); print('err', file=sys.stderr)"

    ended = await run(runner, script)

    assert (ended.end, ended.exit_code, ended.stdout, ended.stderr) == (RunEnd.EXITED, 0, "out\n", "err\n")
    assert ended.usage.wall_seconds > 0
    assert 0 < ended.usage.cpu_seconds < 20
    assert 40_000 < ended.usage.peak_memory_kib < 200_000


async def test_a_run_returns_the_exit_code_of_the_script(runner: SubprocessRunner) -> None:
    assert (await run(runner, "raise SystemExit(7)")).exit_code == 7


async def test_a_script_has_an_empty_folder_and_no_environment_of_the_worker(
    runner: SubprocessRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    script = (
        "import os, sys; print(sorted(os.environ), os.listdir(), repr(sys.stdin.read()), os.listdir('/proc/self/fd'))"
    )

    ended = await run(runner, script)

    # The interpreter sets LC_CTYPE if it finds no locale; descriptor 3 is the folder being listed.
    assert ended.stdout.replace("'LC_CTYPE'", "") == "[] ['main.py'] '' ['0', '1', '2', '3']\n"


async def test_a_script_is_ended_at_its_time_limit(runner: SubprocessRunner) -> None:
    ended = await run(runner, "import time; print('begun'); time.sleep(600)", timeout_seconds=1)

    assert (ended.end, ended.stdout) == (RunEnd.TIMED_OUT, "begun\n")
    assert 0.5 < ended.usage.wall_seconds < 20


async def test_a_script_is_ended_at_its_cpu_limit(runner: SubprocessRunner) -> None:
    ended = await run(runner, "while True: pass", timeout_seconds=60, cpu_limit=0.001)

    assert (ended.end, ended.exit_code) == (RunEnd.EXITED, -signal.SIGXCPU)
    assert 1.5 < ended.usage.cpu_seconds < 4


async def test_a_script_cannot_exceed_its_memory_limit(runner: SubprocessRunner) -> None:
    ended = await run(runner, "x = bytearray(300_000_000)", memory_limit_mb=128)

    assert ended.exit_code == 1
    assert "MemoryError" in ended.stderr
    assert ended.usage.peak_memory_kib < 128 * 1024


async def test_a_script_cannot_exceed_its_file_size_limit(settings: PlatformSection) -> None:
    runner = SubprocessRunner(settings.model_copy(update={"file_limit_bytes": 1_000}))

    ended = await run(runner, "open('f', 'wb', buffering=0).write(b'x' * 1_000); open('f', 'ab', 0).write(b'x')")

    assert "File too large" in ended.stderr


async def test_truncated_output_is_marked(runner: SubprocessRunner, settings: PlatformSection) -> None:
    ended = await run(runner, "print('x' * 100_000, end='')")

    assert ended.exit_code == 0
    kept, _, note = ended.stdout.rpartition("\n")
    assert kept == "x" * settings.output_limit_bytes
    assert note == f"[cut off here: {100_000 - settings.output_limit_bytes} more bytes]"


async def test_a_script_that_floods_its_output_is_ended_without_using_memory_of_the_worker(
    settings: PlatformSection,
) -> None:
    runner = SubprocessRunner(settings.model_copy(update={"output_flood_bytes": 50_000_000}))
    before = psutil.Process().memory_info().rss

    ended = await run(runner, "while True: print('x' * 10_000)", timeout_seconds=60)

    assert ended.end is RunEnd.FLOODED
    assert len(ended.stdout) < settings.output_limit_bytes + 100
    assert psutil.Process().memory_info().rss - before < 20_000_000


async def test_binary_output_is_converted_to_text(runner: SubprocessRunner) -> None:
    ended = await run(runner, r"import sys; sys.stdout.buffer.write(b'a\x00b\xff\xfe')")

    assert ended.stdout == "a\ufffdb\ufffd\ufffd"


async def test_a_stopped_pod_returns_its_output(
    runner: SubprocessRunner, tmp_path: Path, new_children: Callable[[], list[psutil.Process]]
) -> None:
    stop, begun = asyncio.Event(), tmp_path / "begun"
    script = f"import time; print('begun'); open({str(begun)!r}, 'w'); time.sleep(600)"

    running = asyncio.create_task(run(runner, script, stop=stop))
    await until(begun.exists)
    stop.set()

    ended = await running
    assert (ended.end, ended.stdout) == (RunEnd.STOPPED, "begun\n")


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """Return the processes that this test has started, without the servers of the session."""
    before = set(psutil.Process().children())
    return lambda: [child for child in psutil.Process().children() if child not in before]


async def test_child_processes_end_with_the_script(runner: SubprocessRunner, tmp_path: Path) -> None:
    """The grandchild has left the process group and lost its parent, but not its reaper."""
    pid_file = tmp_path / "pid"

    ended = await run(runner, FORK_AWAY.format(pid_file=str(pid_file)))

    assert ended.exit_code == 0
    assert is_gone(int(pid_file.read_text()))


async def test_a_cancelled_run_leaves_no_process_and_no_file(
    runner: SubprocessRunner, tmp_path: Path, new_children: Callable[[], list[psutil.Process]]
) -> None:
    pid_file = tmp_path / "pid"
    script = FORK_AWAY.format(pid_file=str(pid_file)) + "time.sleep(600)"

    running = asyncio.create_task(run(runner, script))
    await until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert is_gone(int(pid_file.read_text()))
    assert new_children() == []
    assert folders(tmp_path) == []


async def test_a_run_cancelled_during_its_start_leaves_no_process_and_no_file(
    runner: SubprocessRunner, tmp_path: Path, new_children: Callable[[], list[psutil.Process]]
) -> None:
    for rounds in range(12):
        running = asyncio.create_task(run(runner, "import time; time.sleep(600)"))
        for _ in range(rounds):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    assert new_children() == []
    assert folders(tmp_path) == []


async def test_a_run_cancelled_after_its_process_started_waits_for_its_end(
    runner: SubprocessRunner, monkeypatch: pytest.MonkeyPatch, new_children: Callable[[], list[psutil.Process]]
) -> None:
    """Cancelled after the process has started, before its creation returns."""
    start, started, may_return = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def start_slowly(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **options)
        started.set()
        await may_return.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_slowly)
    running = asyncio.create_task(run(runner, "import time; time.sleep(600)"))
    await started.wait()
    running.cancel()
    asyncio.get_running_loop().call_soon(may_return.set)
    await asyncio.wait([running])

    assert running.cancelled()
    assert new_children() == []


async def test_a_script_does_not_outlive_a_killed_worker(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = FORK_AWAY.format(pid_file=str(pid_file)) + "time.sleep(600)"
    here = Path(__file__).parents[2]

    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN_AND_WAIT, str(tmp_path), script, cwd=here)
    await until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    worker.kill()
    await worker.wait()

    await until(lambda: is_gone(int(pid_file.read_text())))
    await until(lambda: folders(tmp_path) == [])


async def test_a_script_dies_with_its_supervisor(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time; print(os.getpid(), file=open({str(pid_file)!r}, 'w'), flush=True); time.sleep(600)"
    here = Path(__file__).parents[2]

    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN_AND_WAIT, str(tmp_path), script, cwd=here)
    await until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    (supervisor,) = psutil.Process(worker.pid).children()
    supervisor.suspend()
    worker.kill()
    await worker.wait()
    supervisor.kill()

    await until(lambda: is_gone(int(pid_file.read_text())))


async def test_a_script_that_kills_its_supervisor_dies_with_it(runner: SubprocessRunner, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); os.kill(os.getppid(), 9); "

    ended = await run(runner, script + "time.sleep(600)")

    assert ended.end is RunEnd.LOST
    await until(lambda: is_gone(int(pid_file.read_text())))


async def test_many_scripts_run_concurrently(runner: SubprocessRunner) -> None:
    ended = await asyncio.gather(*(run(runner, f"print({number})") for number in range(12)))

    assert [run.stdout for run in ended] == [f"{number}\n" for number in range(12)]


async def test_no_file_descriptor_is_left_open(runner: SubprocessRunner) -> None:
    await run(runner, "print()")
    before = open_files()

    for _ in range(3):
        await run(runner, "print()")

    assert open_files() == before


async def test_an_unsupported_language_is_refused(runner: SubprocessRunner) -> None:
    with pytest.raises(UnsupportedLanguageError, match="unsupported language cobol; supported: python"):
        await run(runner, "DISPLAY 'A'", language="cobol")
