"""Contradicting settings and applications are rejected at start, before any connection is opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from integr8s_idem import BaseEvent, EventRouter, Platform, Service
from integr8s_idem.cli.run_command import Run
from integr8s_idem.config import load_settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.runtime import ServiceGroup
from tests.support.shop import billing_providers

CONTRADICTIONS = """
[kafka]
bootstrap_servers = "127.0.0.1:1"
heartbeat_interval_seconds = 16
session_timeout_seconds = 45

[store]
url = "redis://127.0.0.1:1/0"
timeout_seconds = 11

[idempotency]
processing_timeout_seconds = 30
default_ttl_seconds = 29

[services.billing]
handler_timeout_seconds = 31
drain_timeout_seconds = 61
"""


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"


@pytest.mark.scenario(97)
def test_contradicting_settings_are_rejected_with_both_values_before_any_connection(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(CONTRADICTIONS)
    command = [sys.executable, "-m", "integr8s_idem", "run", "tests.support.shop:platform"]
    command += ["--settings", str(tmp_path / "settings.toml")]
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith("INTEGR8S_IDEM_")}

    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)

    output = " ".join((ended.stdout + ended.stderr).split())
    assert ended.returncode == 2, output
    assert "5 mistakes" in output
    for value, bound in (("= 16", "= 45"), ("= 11", "= 30"), ("= 29", "= 30"), ("= 31", "= 30"), ("= 61", "= 60")):
        assert value in output
        assert bound in output


@pytest.mark.scenario(99)
def test_two_services_with_one_name_are_rejected() -> None:
    with pytest.raises(ApplicationError, match="two services are named billing: they would share keys"):
        Platform(Service("billing", providers=billing_providers), Service("billing", providers=billing_providers))


@pytest.mark.scenario(99)
@pytest.mark.parametrize("source", ["by the application", "by the settings", "by the name"])
def test_two_services_with_one_consumer_group_are_rejected_even_if_only_one_is_started(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    in_settings = '[services.shipping]\ngroup_id = "shop"' if source == "by the settings" else ""
    (tmp_path / "settings.toml").write_text(in_settings)
    groups = {
        "by the application": ("shop", "shop"),
        "by the settings": ("shop", None),
        "by the name": ("shipping", None),
    }
    services = [
        Service(name, providers=billing_providers, group_id=group)
        for name, group in zip(("billing", "shipping"), groups[source], strict=True)
    ]

    with pytest.raises(ApplicationError, match="billing and shipping share the consumer group"):
        Run(Platform(*services), services[:1]).settings()
    with pytest.raises(ApplicationError, match="billing and shipping share the consumer group"):
        ServiceGroup(services, load_settings(tmp_path / "settings.toml"))


@pytest.mark.scenario(99)
def test_two_handlers_with_one_name_from_two_routers_are_rejected() -> None:
    first, second = EventRouter(), EventRouter()

    async def charge(event: OrderPlaced) -> None: ...

    first.on(OrderPlaced)(charge)
    second.on(OrderPlaced)(charge)

    with pytest.raises(ApplicationError, match="two handlers named charge, which would share a key"):
        first.include(second)
