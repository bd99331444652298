"""Helpers to run the doctor."""

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
"""Longer than the default retention of topics."""


def codes(findings: Iterable[Finding]) -> list[str]:
    """Return the codes of findings that need a fix."""
    return [finding.code.value for finding in findings if finding.severity is not Severity.INFO]


async def found_in(text: str, folder: Path, platform: Platform | None = None) -> list[Finding]:
    """Return all findings with `text` as settings.toml."""
    file = folder / "settings.toml"
    file.write_text(text)
    return await examine(Examination(file, platform))


async def found_in_store(store: StoreSettings, now: Callable[[], float] = time.time) -> list[Finding]:
    """Return the findings about a store."""
    return await check_store(Settings(store=store), now)


@dataclass(frozen=True)
class Answer:
    """The exit status of the command, and the objects of its `--json` output."""

    status: int
    objects: list[dict[str, str]]

    @property
    def codes(self) -> list[str]:
        return [one["code"] for one in self.objects]


Typed: TypeAlias = Callable[[StoreSettings], Answer]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Run `integr8s-idem doctor --json` for a store, without findings about brokers."""

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
