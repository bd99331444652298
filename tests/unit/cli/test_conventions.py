"""What all commands have in common: help, streams, exit statuses, files that are not overwritten unasked."""

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
from integr8s_idem.cli.common import FAILURE, answered
from integr8s_idem.cli.keys_output import show_explanation
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
    told = typed("--help").stdout

    assert "--install-completion" in told
    assert "--show-completion" in told


def test_a_graph_does_not_overwrite_a_file_unasked() -> None:
    file = Path("graph.md")
    file.write_text("mine")

    refused = typed("graph", "conventions_shop:platform", "-o", str(file))
    kept = file.read_text()
    forced = typed("graph", "conventions_shop:platform", "-o", str(file), "--force")

    assert refused.exit_code == 2
    assert "graph.md is there already" in refused.stderr
    assert kept == "mine"
    assert forced.exit_code == 0, forced.output
    assert file.read_text() != "mine"


def test_top_without_a_terminal_prints_once() -> None:
    told = typed("top", "127.0.0.1:1", "--interval", "0.1")

    assert told.exit_code == FAILURE
    assert told.stdout.count("127.0.0.1:1 down") == 1


@pytest.mark.parametrize("command", ["release", "purge"])
def test_keys_that_nobody_knows_are_status_1_and_an_empty_list_is_not(command: str) -> None:
    Path("settings.toml").write_text('[store]\nkind = "sqlite"\npath = "records.db"\n')
    typed("store", "migrate")

    assert typed("keys", command, "order_placed:1", "--yes").exit_code == FAILURE
    assert typed("keys", command, "order_placed:1").exit_code == FAILURE
    assert typed("keys", "show", "order_placed:1").exit_code == FAILURE
    assert typed("keys", "list").exit_code == 0
    assert typed("keys", "purge", "--all", "--yes").exit_code == 0


def test_an_interruption_is_status_130_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert answered(interrupted) == INTERRUPTED == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_what_is_not_there_is_status_1_and_what_is_wrong_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(**how: Any) -> int:
        raise ApplicationError("there is no letter at orders.dlq:0:7", **how)

    assert answered(lambda: raising(is_missing=True)) == 1
    assert answered(raising) == 2
    assert capsys.readouterr().err.count("there is no letter") == 2


def test_an_explanation_opens_with_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Explanation("1", read_as="the id of an event", notes=["no record of it"])

    show_explanation(answer, as_json=False, whole_result=False)

    first, *_, last = capsys.readouterr().out.strip().splitlines()
    assert first == "no record of it"
    assert last == "read as the id of an event"


async def test_the_last_table_stays_on_the_screen_and_its_hint_does_not() -> None:
    screen, drawn = io.StringIO(), itertools.count(1)

    async with LiveTable(Console(file=screen, force_terminal=True)).shown(lambda _: f"table {next(drawn)}", "press"):
        await asyncio.sleep(0)

    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", screen.getvalue())
    before, _, last = shown.rpartition("table ")
    assert "table 1\npress" in before
    assert last == f"{next(drawn) - 1}\n"


def test_the_error_of_a_wait_that_was_too_long_is_public() -> None:
    assert integr8s_idem.IdempotencyConflictError is IdempotencyConflictError
    assert "IdempotencyConflictError" in integr8s_idem.__all__
