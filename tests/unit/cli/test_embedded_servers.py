"""Settings of commands with sections of applications, and embedded servers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from integr8s_idem.cli.app import app
from integr8s_idem.cli.embedded_servers import announce_servers
from integr8s_idem.config import load_settings
from integr8s_idem.embedded.discovery import announced_servers, running_servers
from integr8s_idem.errors import SettingsError

SHOP = """
from integr8s_idem.config import Section, Settings
from integr8s_idem.runtime import Platform, Service

class ShopSection(Section):
    '''What a shop sets.'''

    currency: str = "EUR"
    '''What customers pay with.'''

class ShopSettings(Settings):
    shop: ShopSection = ShopSection()

platform = Platform(Service("billing", providers=[]), settings=ShopSettings)
"""
SQLITE = '[store]\nkind = "sqlite"\npath = "records.db"\n'
AN_APPLICATIONS = '[shop]\ncurrency = "EUR"\n'
NOBODY = (
    '[kafka]\nbootstrap_servers = "127.0.0.1:1"\nrequest_timeout_seconds = 1\n'
    '[store]\nurl = "redis://127.0.0.1:1/0"\ntimeout_seconds = 0.2\n[telemetry]\nmetrics_port = 1\n'
)
HINT = "A worker runs embedded servers in this folder: add --embedded to use them"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    Path("servers_shop.py").write_text(SHOP)
    yield
    sys.modules.pop("servers_shop", None)


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


COMMANDS = [
    ("store", "migrate"),
    ("store", "purge"),
    ("store", "sql"),
    ("keys", "list"),
    ("keys", "show", "order_placed:1"),
    ("keys", "explain", "order_placed:1"),
    ("keys", "release", "order_placed:1", "--yes"),
    ("keys", "purge", "--all", "--yes"),
    ("settings", "check"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("application", [[], ["--app", "servers_shop:platform"]], ids=["unknown", "known"])
def test_commands_ignore_sections_of_applications(command: tuple[str, ...], application: list[str]) -> None:
    Path("settings.toml").write_text(SQLITE + AN_APPLICATIONS)
    assert typed("store", "migrate").exit_code == 0
    if command[:2] == ("keys", "explain"):
        application = []  # it makes the containers, and this platform has none

    answer = typed(*command, *application)

    assert "unknown setting" not in answer.output
    assert answer.exit_code in {0, 1}, answer.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_misspelled_section_of_the_library_is_a_mistake(command: tuple[str, ...]) -> None:
    Path("settings.toml").write_text(SQLITE + '[kafak]\nclient_id = "x"\n')

    answer = typed(*command)

    assert answer.exit_code == 2
    assert "kafak  unknown setting; did you mean kafka?" in answer.stderr


def test_a_mistake_in_a_section_of_the_application_is_found_with_app() -> None:
    Path("settings.toml").write_text(SQLITE + '[shop]\ncurrency_code = "EUR"\n')

    ignoring, knowing = typed("store", "migrate"), typed("store", "migrate", "--app", "servers_shop:platform")

    assert ignoring.exit_code == 0
    assert knowing.exit_code == 2
    assert "shop.currency_code" in knowing.stderr


def test_settings_check_lists_the_sections_it_did_not_check() -> None:
    Path("settings.toml").write_text(AN_APPLICATIONS)

    assert "[shop]: not checked; use --app MODULE:APP" in typed("settings", "check").stderr
    assert "not checked" not in typed("settings", "check", "--app", "servers_shop:platform").output


def test_the_settings_of_the_reference_platform_are_valid() -> None:
    file = Path("platform.toml")
    file.write_text((Path(__file__).parents[3] / "settings.example.toml").read_text() + "\n[platform]\n")

    assert typed("settings", "check", "--settings", str(file)).exit_code == 0


def test_unknown_sections_are_a_mistake_when_an_application_loads_its_settings() -> None:
    Path("settings.toml").write_text(AN_APPLICATIONS)

    with pytest.raises(SettingsError, match="shop  unknown setting"):
        load_settings()


SERVER_COMMANDS = [
    ("keys", "list"),
    ("keys", "show", "order_placed:1"),
    ("keys", "explain", "order_placed:1"),
    ("keys", "release", "order_placed:1", "--yes"),
    ("keys", "purge", "--all", "--yes"),
    ("dlq", "list"),
    ("doctor",),
    ("top", "--once", "--interval", "0.1"),
]


@pytest.mark.parametrize("command", SERVER_COMMANDS, ids=" ".join)
def test_commands_suggest_embedded_servers_if_no_server_answers(command: tuple[str, ...]) -> None:
    Path("settings.toml").write_text(NOBODY)

    alone = typed(*command)
    with announced_servers({"kafka": {"bootstrap_servers": "127.0.0.1:1"}}):
        beside = typed(*command)
        embedded = typed(*command, "--embedded")

    assert alone.exit_code == beside.exit_code != 0
    assert HINT not in alone.stderr
    assert HINT in beside.stderr
    assert HINT not in embedded.stderr


@pytest.mark.parametrize("command", [*SERVER_COMMANDS, *COMMANDS[:3]], ids=" ".join)
def test_every_command_that_uses_servers_supports_embedded(command: tuple[str, ...]) -> None:
    answer = typed(*command, "--embedded")

    assert answer.exit_code != 0
    assert "no embedded servers found" in answer.stderr


def test_the_metrics_address_is_announced_once_it_is_known() -> None:
    with announce_servers({"kafka": {"bootstrap_servers": "127.0.0.1:1"}}) as announce_metrics:
        before = running_servers().sections
        announce_metrics("127.0.0.1", 12345)
        after = running_servers().sections
        files = [path.name for path in Path(".integr8s-idem").glob("*.toml")]

    assert "telemetry" not in before
    assert after == {**before, "telemetry": {"metrics_host": "127.0.0.1", "metrics_port": 12345}}
    assert len(files) == 1
    assert list(Path(".integr8s-idem").glob("*.toml")) == []
