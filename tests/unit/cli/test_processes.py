"""`integr8s-idem run --processes`: numbers, commands, and combinations that make no sense."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from integr8s_idem.cli.app import app
from integr8s_idem.cli.processes import MOST_PROCESSES, process_count, usable_processors, worker_launch
from integr8s_idem.cli.run_command import grace_seconds
from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.runtime import Service
from tests.packaging.test_deploy_kubernetes import draining

SHOP = """
from integr8s_idem import EventRouter, Platform, Service
from integr8s_idem.integrations.dishka import DispatcherProvider, KafkaProvider

platform = Platform(Service("billing", providers=[KafkaProvider(), DispatcherProvider(EventRouter())]))
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path("processes_shop.py").write_text(SHOP)
    yield
    sys.modules.pop("processes_shop", None)


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", "processes_shop:platform", *arguments])


def test_auto_is_the_number_of_usable_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5}, raising=False)

    assert process_count("auto") == 3


def test_without_affinities_auto_is_the_number_of_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    assert usable_processors() == 4


@pytest.mark.parametrize("text", ["0", "-1", "two", "", "1.5", "²", str(MOST_PROCESSES + 1)])
def test_other_numbers_of_processes_are_refused(text: str) -> None:
    with pytest.raises(ApplicationError, match="write a number from 1 to 256, or auto"):
        process_count(text)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["--processes", "many"], "", "invalid --processes 'many'"),
        (["--processes", "2", "--embedded"], "", "--embedded starts a Kafka and a Redis for one process"),
        (["--processes", "2"], '[store]\nkind = "memory"', "keeps the records of each process apart"),
        (["--processes", "2"], "[kafka]\ntopic_prefx = 1", "topic_prefx"),
        (["--worker-process", "1:999"], "", "--worker-process is set by the supervisor"),
    ],
)
def test_mistakes_are_reported_before_anything_starts(arguments: list[str], settings: str, message: str) -> None:
    Path("settings.toml").write_text(settings)

    result = typed(*arguments)

    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_windows_is_refused_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    result = typed("--processes", "2")

    assert result.exit_code == 2
    assert "not supported on Windows; start the command several times" in result.stderr


def test_a_worker_is_started_as_its_supervisor_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/env/bin/integr8s-idem", "run", "shop:platform", "--processes=2"])
    monkeypatch.setattr(
        sys,
        "orig_argv",
        ["python3", "-X", "dev", "/env/bin/integr8s-idem", "run", "shop:platform", "--processes=2"],
    )

    command = worker_launch().adding("shop:platform").command

    assert command == [sys.executable, "-X", "dev", "/env/bin/integr8s-idem", "run", "shop:platform"]


def test_a_worker_is_started_as_a_module_if_the_command_was_called_by_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/supervise-all"])

    assert worker_launch().command == [sys.executable, "-m", "integr8s_idem", "run"]


def test_workers_keep_the_folder_and_environment_of_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOP", "one")
    launch = worker_launch()
    monkeypatch.setenv("SHOP", "two")
    monkeypatch.chdir("/")

    assert (launch.folder, launch.env["SHOP"]) == (tmp_path, "one")


def test_the_grace_period_is_that_of_a_pod() -> None:
    assert grace_seconds(Settings(), [Service("billing", providers=[])]) == sum(draining().values())
