"""A supervisor and its worker processes: signals, deaths and orphans, without a broker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.conditions import wait_until
from tests.support.ports import reserve_port
from tests.support.processes import ServiceProcess
from tests.support.supervised import SupervisedProcess, gone, is_running, supervised
from tests.support.terminal import Terminal

pytestmark = pytest.mark.slow

Start = Callable[..., SupervisedProcess]


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> Path:
    """Return settings for a broker that does not answer."""
    file = tmp_path / "settings.toml"
    file.write_text(
        f'[kafka]\nbootstrap_servers = "127.0.0.1:{reserve_port()}"\n[store]\nurl = "{redis_url}"\n'
        "[telemetry]\nmetrics_port = 0\n"
    )
    return file


def arguments(settings: Path, *others: str) -> list[str]:
    return ["tests.support.shop:platform", "--settings", str(settings), "--json", "--processes", "2", *others]


def until_attached(process: SupervisedProcess) -> list[psutil.Process]:
    """Wait until both workers run their services."""
    wait_until(
        lambda: all("cannot reach Kafka" in each["reason"] for each in process.health()["worker_processes"]),
        state=lambda: process.output,
    )
    workers = process.workers
    assert sorted(workers) == [1, 2]
    return list(workers.values())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_workers_and_the_exit_status_is_0(
    number: signal.Signals, settings: Path, tmp_path: Path
) -> None:
    with supervised(*arguments(settings), log=tmp_path / "log") as process:
        workers = until_attached(process)
        os.kill(process.pid, number)

        assert process.wait() == 0, process.output
        assert not [each for each in workers if is_running(each)]
    assert process.output.count("draining: waiting for running handlers") == 2
    assert "stopping immediately" not in process.output


def test_a_signal_to_all_processes_drains_as_well(settings: Path, tmp_path: Path) -> None:
    """systemd sends SIGTERM to each process of a unit, and containers may do so, too."""
    with supervised(*arguments(settings), log=tmp_path / "log") as process:
        for each in [*until_attached(process), psutil.Process(process.pid)]:
            each.send_signal(signal.SIGTERM)

        assert process.wait() == 0, process.output
    assert "stopping immediately" not in process.output


def test_ctrl_c_reaches_only_the_supervisor(settings: Path, tmp_path: Path) -> None:
    with supervised(*arguments(settings), log=tmp_path / "log") as process:
        workers = until_attached(process)

        assert {os.getpgid(each.pid) for each in workers} == {each.pid for each in workers}
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() == 0, process.output


def test_a_signal_while_the_workers_start_ends_them_at_once(tmp_path: Path, settings: Path) -> None:
    command = ["tests.support.slow_import:platform", *arguments(settings)[1:]]
    with supervised(*command, log=tmp_path / "log", env={"BLOCKED": str(tmp_path)}) as process:
        wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2, state=lambda: process.output)
        process.terminate()

        assert process.wait() == 0, process.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_while_the_workers_start_is_no_failure(
    number: signal.Signals, tmp_path: Path, settings: Path
) -> None:
    """`KillSignal=` of systemd can be SIGINT."""
    command = ["tests.support.slow_import:platform", *arguments(settings)[1:]]
    with supervised(*command, log=tmp_path / "log", env={"BLOCKED": str(tmp_path)}) as process:
        wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2, state=lambda: process.output)
        for each in [psutil.Process(process.pid), *process.workers.values()]:
            with suppress(psutil.NoSuchProcess):  # the supervisor has passed the signal on, and it has ended
                each.send_signal(number)

        assert process.wait() == 0, process.output


def test_no_worker_outlives_a_supervisor_that_is_killed(settings: Path, tmp_path: Path) -> None:
    with supervised(*arguments(settings), log=tmp_path / "log") as process:
        workers = until_attached(process)
        process.kill()

        gone(workers)
    assert process.output.count("the supervisor of this worker process has died: draining") == 2


def test_no_worker_that_is_still_starting_outlives_its_supervisor(settings: Path, tmp_path: Path) -> None:
    command = ["tests.support.slow_import:platform", *arguments(settings)[1:]]
    with supervised(*command, log=tmp_path / "log", env={"BLOCKED": str(tmp_path)}) as process:
        wait_until(lambda: len(list(tmp_path.glob("[0-9]*"))) == 2, state=lambda: process.output)
        workers = list(process.workers.values())
        process.kill()

        gone(workers)


def test_a_worker_that_dies_is_started_again(settings: Path, tmp_path: Path) -> None:
    with supervised(*arguments(settings), log=tmp_path / "log") as process:
        first, second = until_attached(process)
        second.kill()
        line = process.wait_for_line("ended: killed by SIGKILL; the next start is in")
        wait_until(lambda: process.workers.get(2) not in (None, second), state=lambda: process.output)

        assert "worker process 2" in line
        assert process.workers[1] == first
        assert process.metric("idempotency_worker_process_restarts_total") == 1


def test_settings_that_become_invalid_end_the_supervisor_when_a_worker_starts(settings: Path, tmp_path: Path) -> None:
    with supervised(*arguments(settings), log=tmp_path / "log") as process:
        first, _ = until_attached(process)
        settings.write_text("[kafka]\ntopic_prefx = 1\n")
        first.kill()

        assert process.wait() == 2, process.output
    assert "topic_prefx" in process.output
    assert "restarting it would not help" in process.output


def test_one_process_has_no_supervisor(settings: Path, tmp_path: Path) -> None:
    command = [*arguments(settings)[:-1], "1"]
    with ServiceProcess(*command, log=tmp_path / "log") as process:
        process.wait_for_line("metrics and health")

        assert psutil.Process(process.pid).children() == []
        assert "worker process" not in process.output


def test_a_terminal_shows_the_log_of_all_processes_without_a_table(settings: Path, tmp_path: Path) -> None:
    command = ["run", "tests.support.shop:platform", "--settings", str(settings), "--processes", "2"]
    with Terminal(*command, folder=Path.cwd()) as terminal:
        terminal.wait_for("worker_process=1")
        terminal.wait_for("worker_process=2")
        terminal.interrupt()
        status = terminal.wait()

    assert status == 0, terminal.said
    assert "handled" not in terminal.said
