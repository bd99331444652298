"""Conventions shared by all commands: help, streams, exit statuses, and confirmation before overwriting files."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import integr8s_idem
from integr8s_idem.cli.app import app
from integr8s_idem.cli.common import FAILURE, exit_status_of
from integr8s_idem.cli.keys_output import print_explanation
from integr8s_idem.cli.live_table import LiveTable
from integr8s_idem.cli.output import INTERRUPTED
from integr8s_idem.errors import ApplicationError, IdempotencyConflictError
from integr8s_idem.operations.keys.explanation import Explanation
from tests.packaging.reference_commands import commands

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
    Path("conventions_shop.py").write_text(SHOP)
    yield
    sys.modules.pop("conventions_shop", None)


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("command", commands(), ids=str)
def test_every_command_takes_h_for_help(command: str) -> None:
    words = command.split()[1:]

    short, long = typed(*words, "-h"), typed(*words, "--help")

    assert short.exit_code == 0
    assert short.stdout == long.stdout


def test_shells_can_complete_commands() -> None:
    help_text = typed("--help").stdout

    assert "--install-completion" in help_text
    assert "--show-completion" in help_text


def test_a_graph_does_not_overwrite_a_file_without_force() -> None:
    file = Path("graph.md")
    file.write_text("mine")

    refused = typed("graph", "conventions_shop:platform", "-o", str(file))
    kept = file.read_text()
    forced = typed("graph", "conventions_shop:platform", "-o", str(file), "--force")

    assert refused.exit_code == 2
    assert "graph.md already exists" in refused.stderr
    assert kept == "mine"
    assert forced.exit_code == 0, forced.output
    assert file.read_text() != "mine"


def test_top_without_a_terminal_prints_once() -> None:
    result = typed("top", "127.0.0.1:1", "--interval", "0.1")

    assert result.exit_code == FAILURE
    assert result.stdout.count("127.0.0.1:1 down") == 1


@pytest.mark.parametrize("command", ["release", "purge"])
def test_unknown_keys_exit_with_status_1_and_an_empty_list_with_0(command: str) -> None:
    Path("settings.toml").write_text('[store]\nkind = "sqlite"\npath = "records.db"\n')
    typed("store", "migrate")

    assert typed("keys", command, "order_placed:1", "--yes").exit_code == FAILURE
    assert typed("keys", command, "order_placed:1").exit_code == FAILURE
    assert typed("keys", "show", "order_placed:1").exit_code == FAILURE
    assert typed("keys", "list").exit_code == 0
    assert typed("keys", "purge", "--all", "--yes").exit_code == 0


def test_an_interruption_exits_with_status_130_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert exit_status_of(interrupted) == INTERRUPTED == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_missing_things_exit_with_status_1_and_invalid_arguments_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(**how: Any) -> int:
        raise ApplicationError("no dead letter at orders.dlq:0:7", **how)

    assert exit_status_of(lambda: raising(is_missing=True)) == 1
    assert exit_status_of(raising) == 2
    assert capsys.readouterr().err.count("no dead letter") == 2


def test_an_explanation_opens_with_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Explanation("1", read_as="the id of an event", notes=["no record of it"])

    print_explanation(answer, as_json=False, whole_result=False)

    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first == "no record of it"
    assert last == "read as the id of an event"


async def test_the_last_table_remains_on_the_screen_without_its_hint() -> None:
    screen, drawn = io.StringIO(), itertools.count(1)

    async with LiveTable(Console(file=screen, force_terminal=True)).shown(lambda _: f"table {next(drawn)}", "press"):
        await asyncio.sleep(0)

    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", screen.getvalue())
    before, _, last = shown.rpartition("table ")
    assert "table 1\npress" in before
    assert last == f"{next(drawn) - 1}\n"


def test_the_error_for_a_wait_timeout_is_public() -> None:
    assert integr8s_idem.IdempotencyConflictError is IdempotencyConflictError
    assert "IdempotencyConflictError" in integr8s_idem.__all__
