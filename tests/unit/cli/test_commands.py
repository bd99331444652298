"""Output and exit status of the commands."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from integr8s_idem.cli.app import app

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


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove settings of this machine, and create a working directory with one application."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "cli_shop", raising=False)
    Path("cli_shop.py").write_text(SHOP)


def typed(*arguments: str) -> Result:
    """Run `integr8s-idem` with these arguments."""
    return CliRunner().invoke(app, arguments)


def test_the_version_is_printed() -> None:
    answer = typed("--version")

    assert answer.stdout == f"integr8s-idem {version('integr8s-idem')}\n"
    assert answer.exit_code == 0


def test_valid_settings_are_ok_and_warnings_are_listed() -> None:
    Path("settings.toml").write_text('[store]\nkind = "memory"\n[idempotency]\ndefault_ttl_seconds = 700_000')

    answer = typed("settings", "check")

    assert answer.exit_code == 0
    assert answer.stdout.splitlines() == [
        "settings.toml: ok",
        '  warning  store.kind  = "memory" is local to one process: records are lost on exit and hidden from other '
        "processes",
    ]


def test_a_folder_without_settings_is_mentioned() -> None:
    answer = typed("settings", "check")

    assert answer.exit_code == 0
    assert "no settings.toml in this folder" in answer.stderr


def test_mistakes_are_printed_on_stderr_with_status_2() -> None:
    Path("settings.toml").write_text("[store]\nurl = 'x'\n[kafka]\nclient_idd = 'x'")

    answer = typed("settings", "check")

    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert answer.stderr.splitlines() == [
        "settings.toml: 2 mistakes",
        "  kafka.client_idd  unknown setting; did you mean client_id?",
        '  store.url         "x" is not a Redis URL; write redis://x/0',
        "Read more: integr8s-idem errors SettingsError",
    ]


def test_mistakes_are_printed_as_json() -> None:
    Path("shop.toml").write_text("[kafka]\nclient_idd = 'x'")

    answer = typed("settings", "check", "--settings", "shop.toml", "--json")

    assert answer.exit_code == 2
    assert json.loads(answer.stdout) == {
        "source": "shop.toml",
        "ok": False,
        "mistakes": [{"path": "kafka.client_idd", "message": "unknown setting; did you mean client_id?"}],
        "warnings": [],
    }


def test_the_sections_of_an_application_are_checked_with_app() -> None:
    Path("settings.toml").write_text("[shop]\ncurrency = 1\n[services.audit]")

    alone, together = typed("settings", "check"), typed("settings", "check", "--app", "cli_shop:platform")

    assert "[shop]: not checked" in alone.stderr
    assert together.stderr.splitlines()[1:-1] == ["  shop.currency  must be a string, not 1"]


HASHING_SHOP = """
from typing import Literal
from integr8s_idem import BaseEvent, EventRouter, KeyStrategy
from integr8s_idem.integrations.dishka import DispatcherProvider, IdempotentDispatcherProvider
from integr8s_idem.runtime import Platform, Service

class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str

router = EventRouter()

@router.on(OrderPlaced)
async def charge(event: OrderPlaced) -> None: ...

def hashing(settings, **options):
    return [IdempotentDispatcherProvider(router, key_strategy=KeyStrategy.CONTENT_HASH, **options)]

def broken(settings):
    raise RuntimeError("no such region")

platform = Platform(
    Service("all", providers=hashing),
    Service("some", providers=lambda settings: hashing(settings, fields=["order_id"])),
    Service("ids", providers=[IdempotentDispatcherProvider(router)]),
    Service("replaced", providers=hashing).with_providers(IdempotentDispatcherProvider(router)),
    Service("plain", providers=[DispatcherProvider(router)]),
    Service("broken", providers=broken),
    Service("own", container=broken),
)
"""


def test_keys_that_are_hashes_of_all_fields_are_a_warning() -> None:
    Path("cli_hashing_shop.py").write_text(HASHING_SHOP)
    Path("settings.toml").write_text("[idempotency]\ndefault_ttl_seconds = 700_000")

    answer = typed("settings", "check", "--app", "cli_hashing_shop:platform")

    assert answer.exit_code == 0
    hashed, broken = answer.stdout.splitlines()[1:]
    assert hashed == (
        "  warning  services.all     key_strategy content_hash without fields covers all fields of OrderPlaced: an "
        "optional field that is added later changes the keys, and redeliveries of earlier events run again; name the "
        'fields that identify the work: fields=["order_id"]'
    )
    assert broken.startswith("  warning  services.broken  its keys are not checked: the container of service broken ")
    assert "RuntimeError: no such region" in broken


FAILURES = """
[[services.billing.failures]]
error = "cli_shop_errors.OutOfStockError"
action = "discard"
[[services.billing.failures]]
error = "cli_shop_errors.OutOfStokError"
action = "discard"
"""


def test_rules_that_name_unknown_errors_are_mistakes() -> None:
    Path("cli_shop_errors.py").write_text("class OutOfStockError(Exception): ...")
    Path("settings.toml").write_text(FAILURES)

    answers = [
        typed("settings", "check"),
        typed("settings", "check", "--app", "cli_shop:platform"),
        typed("run", "cli_shop:platform"),
    ]

    for answer in answers:
        assert answer.exit_code == 2
        [_, *mistake, _] = [line.strip() for line in answer.stderr.splitlines()]
        assert " ".join(mistake) == (
            'services.billing.failures.1.error = "cli_shop_errors.OutOfStokError" does not exist; did you mean '
            "cli_shop_errors.OutOfStockError?"
        )


def test_the_example_contains_the_sections_of_an_application() -> None:
    answer = typed("settings", "example", "--app", "cli_shop:platform")

    assert tomllib.loads(answer.stdout)["shop"] == {"currency": "EUR"}
    assert '# What a shop sets.\n[shop]\n# What customers pay with.\ncurrency = "EUR"\n' in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["run", "cli_shop"], "ApplicationError: "),
        (["dlq", "list", "--group", "--summary"], "use one"),
        (["run", "cli_nowhere:platform"], 'module "cli_nowhere" not found'),
        (["run", "cli_shop:platform", "--service", "audit"], "known services: billing"),
        (["run", "cli_shop:platform", "--settings", "gone.toml"], "gone.toml: 1 mistake"),
        (["settings", "check", "--app", "cli_shop:platfrm"], "did you mean cli_shop:platform?"),
        (["run"], "Missing argument"),
        (["settings", "chek"], "No such command"),
        # As with "$AGE" of a variable that is not set.
        (["keys", "purge", "--service", "billing", "--older-than", ""], 'invalid duration ""'),
        (["keys", "list", "--newer-than", ""], 'invalid duration ""'),
        (["dlq", "replay", "--since", ""], 'invalid time ""'),
        (["dlq", "list", "--until", ""], 'invalid time ""'),
        (["dlq", "replay", "--error", ""], "--error is empty"),
        (["dlq", "replay", "--app", ""], 'invalid application ""'),
        (["settings", "example", "--app", ""], 'invalid application ""'),
    ],
)
def test_invalid_arguments_are_reported_on_stderr_with_status_2(arguments: list[str], shown: str) -> None:
    answer = typed(*arguments)

    assert answer.exit_code == 2
    assert shown in answer.stderr
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr


def test_the_module_can_be_run_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integr8s_idem", "run", "cli_shop:platform", "--service", "audit"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    assert done.stderr.startswith('ApplicationError: unknown service "audit"')


def test_a_misspelled_service_is_reported_with_the_other_mistakes() -> None:
    Path("settings.toml").write_text("[kafka]\nclient_id = 3\n[services.biling]")

    answer = typed("settings", "check", "--app", "cli_shop:platform")

    assert answer.exit_code == 2
    assert "services.biling  is not a service of this application; did you mean services.billing?" in answer.stderr
    assert "kafka.client_id" in answer.stderr


@pytest.mark.parametrize("command", [[], ["run"], ["settings", "check"]])
def test_the_help_shows_flags_without_a_value(command: list[str]) -> None:
    answer = typed(*command, "--help")

    assert answer.exit_code == 0
    assert "bool" not in answer.stdout
    assert "..." not in answer.stdout.replace("[ARGS]...", "")


def test_a_platform_without_services_is_reported_on_one_line() -> None:
    Path("cli_empty.py").write_text("from integr8s_idem.runtime import Platform\nplatform = Platform()")

    answer = typed("run", "cli_empty:platform")

    assert answer.exit_code == 2
    assert answer.stderr.startswith("ApplicationError: ")
    assert len(answer.stderr.splitlines()) == 1


def test_unavailable_brokers_are_reported_with_a_link() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        Path("settings.toml").write_text(f'[kafka]\nbootstrap_servers = "127.0.0.1:{nobody.getsockname()[1]}"')

        answer = typed("dlq", "list")

    assert answer.exit_code == 1
    assert answer.stderr.startswith("BrokerUnavailableError: no answer from 127.0.0.1:")
    assert "integr8s-idem errors BrokerUnavailableError" in answer.stderr
