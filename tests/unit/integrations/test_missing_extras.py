"""Errors of integrations and stores whose optional dependency is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from integr8s_idem.cli.app import app
from integr8s_idem.errors import ApplicationError


@pytest.mark.parametrize(
    ("extra", "missing"), [("confluent", "confluent_kafka"), ("faststream", "faststream"), ("httpx", "httpx")]
)
def test_a_missing_package_error_names_the_extra_to_install(
    extra: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"integr8s_idem.integrations.{extra}"
    for loaded in [each for each in sys.modules if each.startswith(name) or each.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(ApplicationError, match=rf'{name} needs {missing}; .*pip install "integr8s-idem\[{extra}\]"'):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("package", "extra", "missing"), [("sql", "sql", "sqlalchemy"), ("dynamodb", "dynamodb", "aiobotocore")]
)
def test_a_missing_store_driver_error_names_the_extra_to_install(
    package: str, extra: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"integr8s_idem.stores.{package}"
    for loaded in [each for each in sys.modules if each.startswith(name) or each.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(
        ModuleNotFoundError, match=rf'{name} needs {missing}.*; .*pip install "integr8s-idem\[{extra}\]"'
    ):
        importlib.import_module(name)


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("sqlite", "aiosqlite", "sql"),
        ("postgresql", "asyncpg", "sql"),
        ("mysql", "aiomysql", "mysql"),
        ("dynamodb", "aiobotocore", "dynamodb"),
    ],
)
def test_settings_check_reports_a_missing_extra(
    kind: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = {"postgresql": "postgresql://localhost/shop", "mysql": "mysql://localhost/shop"}.get(kind)
    file = tmp_path / "settings.toml"
    file.write_text(f'[store]\nkind = "{kind}"\n' + (f'url = "{address}"\n' if address else ""))
    find_spec = importlib.util.find_spec
    complete = CliRunner().invoke(app, ["settings", "check", "--settings", str(file)])
    monkeypatch.setattr(
        "integr8s_idem.config.message_text.find_spec",
        lambda name: None if name == module else find_spec(name),
        raising=False,
    )

    incomplete = CliRunner().invoke(app, ["settings", "check", "--settings", str(file)])

    assert complete.exit_code == 0, complete.output
    assert incomplete.exit_code == 2
    stderr = " ".join(incomplete.stderr.split())
    assert f'store.kind = "{kind}" needs {module}; install the extra {extra}' in stderr
    assert f'pip install "integr8s-idem[{extra}]"' in stderr


def test_settings_check_reports_all_missing_extras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[store]\nkind = "sqlite"\n[telemetry]\notlp_endpoint = "http://localhost:4317"\n')
    monkeypatch.setattr("integr8s_idem.config.message_text.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)

    checked = CliRunner().invoke(app, ["settings", "check", "--settings", str(file)])

    assert checked.exit_code == 2
    assert "2 mistakes" in checked.stderr
    assert {extra for extra in ("sql", "otlp-grpc") if f'pip install "integr8s-idem[{extra}]"' in checked.stderr} == {
        "sql",
        "otlp-grpc",
    }
