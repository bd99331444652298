"""What doctor finds, for tests."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from typer.testing import CliRunner

import integr8s_idem.doctor.examination as examination
from integr8s_idem.cli.app import app
from integr8s_idem.config import Settings, StoreSettings
from integr8s_idem.diagnostics import Finding, Severity
from integr8s_idem.doctor import Examination, examine
from integr8s_idem.doctor.broker_checks import BrokerReport
from integr8s_idem.doctor.store_checks import check_store
from integr8s_idem.runtime import Platform

KEPT_FOR_EIGHT_DAYS = "[idempotency]\ndefault_ttl_seconds = 691_200\n"
"""Longer than topics keep events by default."""


def codes(findings: Iterable[Finding]) -> list[str]:
    """The findings that need a fix."""
    return [finding.code.value for finding in findings if finding.severity is not Severity.INFO]


async def found_in(text: str, folder: Path, platform: Platform | None = None) -> list[Finding]:
    """All that a whole examination finds with such a settings.toml."""
    file = folder / "settings.toml"
    file.write_text(text)
    return await examine(Examination(file, platform))


async def found_in_store(store: StoreSettings, now: Callable[[], float] = time.time) -> list[Finding]:
    """What is found about a store alone."""
    return await check_store(Settings(store=store), now)


@dataclass(frozen=True)
class Answer:
    """What the command left: its exit status, and the objects of `--json`."""

    status: int
    objects: list[dict[str, str]]

    @property
    def codes(self) -> list[str]:
        return [one["code"] for one in self.objects]


Typed: TypeAlias = Callable[[StoreSettings], Answer]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """`integr8s-idem doctor --json` for a store, with brokers of which nothing is to be said."""

    async def nothing(*_: Any) -> BrokerReport:
        return BrokerReport([])

    monkeypatch.setattr(examination, "check_brokers", nothing)
    for name in [name for name in os.environ if name.startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)

    def answer(store: StoreSettings) -> Answer:
        given = store.model_dump(exclude_unset=True, exclude_none=True)
        lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
        file = tmp_path / "settings.toml"
        file.write_text("\n".join(["[idempotency]", "default_ttl_seconds = 691_200", "[store]", *lines, ""]))
        ended = CliRunner().invoke(app, ["doctor", "--json", "--settings", str(file)])
        return Answer(ended.exit_code, json.loads(ended.stdout))

    return answer
