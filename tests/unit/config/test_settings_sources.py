"""Sources of settings, and their precedence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, SecretStr

from integr8s_idem.config import (
    MemoryStoreSettings,
    OnFailure,
    OnStoreError,
    RedisStoreSettings,
    Section,
    Settings,
    check_settings,
    load_settings,
)
from integr8s_idem.errors import SettingsError

TUTORIAL = """
[kafka]
bootstrap_servers = "localhost:9092"
topic_prefix = "shop."

[store]
kind = "redis"
url = "redis://localhost:6379/0"

[idempotency]
processing_timeout_seconds = 30      # a dead worker's events are taken over after this
default_ttl_seconds = 691_200        # 8 days: the 7 of a topic, and one to spare

[services.billing]
group_id = "billing"
ordering = "key"
concurrency = 64
max_attempts = 5

[telemetry]
otlp_endpoint = "http://localhost:4317"
metrics_port = 9464
"""


class ShopSection(Section):
    """Settings of a shop."""

    currency: str = "EUR"
    branches: tuple[str, ...] = ()
    till_key: SecretStr | None = None


class ShopSettings(Settings):
    """Settings with a section of the application."""

    shop: ShopSection = ShopSection()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the settings of this machine, and change to an empty working directory."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def written(text: str, name: str = "settings.toml") -> Path:
    """Write a settings file in the working directory."""
    file = Path(name)
    file.write_text(text, encoding="utf-8")
    return file


def test_the_settings_of_the_tutorial_are_valid() -> None:
    settings = load_settings(written(TUTORIAL))

    assert settings.idempotency.processing_timeout_seconds == 30
    assert settings.service("billing").ordering == "key"
    assert check_settings(settings) == []


def test_defaults_apply_without_a_file() -> None:
    assert load_settings() == Settings()


def test_settings_toml_in_the_working_directory_is_read_by_default() -> None:
    written('[kafka]\ntopic_prefix = "shop."')

    assert load_settings().kafka.topic_prefix == "shop."


def test_settings_created_directly_read_no_file() -> None:
    written('[kafka]\ntopic_prefix = "shop."')

    assert Settings().kafka.topic_prefix == ""


def test_precedence_applies_to_each_setting_separately(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def store_section(source: str, *names: str) -> str:
        return "[store]\n" + "\n".join(f'{name} = "{source}"' for name in names)

    file = written(store_section("file", "username", "tls_ca_file", "tls_cert_file", "tls_key_file"))
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    for name in ("username", "tls_ca_file", "tls_cert_file"):
        (secrets / f"INTEGR8S_IDEM_STORE__{name.upper()}").write_text("secret\n")
    monkeypatch.setenv("INTEGR8S_IDEM_SECRETS_DIR", str(secrets))
    for name in ("username", "tls_ca_file"):
        monkeypatch.setenv(f"INTEGR8S_IDEM_STORE__{name.upper()}", "environment")

    store = load_settings(file, overrides={"store": {"username": "argument"}}).store

    assert isinstance(store, RedisStoreSettings)
    assert (store.username, store.tls_ca_file) == ("argument", "environment")
    assert (store.tls_cert_file, store.tls_key_file) == ("secret", "file")


def test_a_store_without_a_kind_is_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_STORE__PASSWORD", "hunter2")

    store = load_settings().store

    assert isinstance(store, RedisStoreSettings)
    assert store.password is not None
    assert store.password.get_secret_value() == "hunter2"


def test_the_memory_store_is_selected_by_its_kind() -> None:
    assert load_settings(written('[store]\nkind = "memory"')).store == MemoryStoreSettings(kind="memory")


def test_underscores_in_a_variable_match_hyphens_in_a_service_name(monkeypatch: pytest.MonkeyPatch) -> None:
    file = written("[services.k8s-worker]\nmax_attempts = 7")
    monkeypatch.setenv("INTEGR8S_IDEM_SERVICES__K8S_WORKER__CONCURRENCY", "8")

    settings = load_settings(file)

    assert list(settings.services) == ["k8s-worker"]
    assert (settings.service("k8s-worker").concurrency, settings.service("k8s-worker").max_attempts) == (8, 7)


def test_a_service_set_only_in_the_environment_is_found_by_its_hyphens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_SERVICES__K8S_WORKER__CONCURRENCY", "8")

    assert load_settings().service("k8s-worker").concurrency == 8


@pytest.mark.parametrize("text", ["a,b", "a, b", '["a", "b"]'])
def test_a_list_in_the_environment_is_comma_separated_or_json(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_SERVICES__BILLING__TOPICS", text)

    assert load_settings().service("billing").topics == ("a", "b")


def test_single_settings_override_a_json_table_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_KAFKA", '{"topic_prefix": "a.", "client_id": "a"}')
    monkeypatch.setenv("INTEGR8S_IDEM_KAFKA__CLIENT_ID", "b")

    kafka = load_settings().kafka

    assert (kafka.topic_prefix, kafka.client_id) == ("a.", "b")


def test_an_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_STORE__PASSWORD", "")

    store = load_settings().store

    assert isinstance(store, RedisStoreSettings)
    assert store.password is None


@pytest.mark.parametrize(
    "name",
    [
        "INTEGR8S_IDEM_SERVICE_HOST",
        "INTEGR8S_IDEM_SERVICE_PORT_METRICS",
        "INTEGR8S_IDEM_PORT",
        "INTEGR8S_IDEM_REDIS_PORT_6379_TCP_ADDR",
        "INTEGR8S_IDEM_TEST_KAFKA",
    ],
)
def test_variables_of_kubernetes_and_tests_are_ignored(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "10.0.0.1")

    assert load_settings() == Settings()


def test_other_files_in_the_folder_of_secrets_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "other").write_bytes(b"\xff")
    (tmp_path / "INTEGR8S_IDEM_STORE__PASSWORD").write_text(" hunter2 \r\n")
    monkeypatch.setenv("INTEGR8S_IDEM_SECRETS_DIR", str(tmp_path))

    store = load_settings().store

    assert isinstance(store, RedisStoreSettings)
    assert store.password == SecretStr(" hunter2 ")


def test_a_missing_folder_of_secrets_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_SECRETS_DIR", str(tmp_path / "gone"))

    with pytest.raises(SettingsError, match=r"INTEGR8S_IDEM_SECRETS_DIR: 1 mistake\n.*gone  cannot be read"):
        load_settings()


def test_a_secret_that_is_not_valid_utf_8_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "INTEGR8S_IDEM_STORE__PASSWORD").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("INTEGR8S_IDEM_SECRETS_DIR", str(tmp_path))

    with pytest.raises(SettingsError, match="INTEGR8S_IDEM_STORE__PASSWORD  is not valid UTF-8"):
        load_settings()


def test_an_application_can_add_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    file = written('[shop]\ncurrency = "CHF"')
    monkeypatch.setenv("INTEGR8S_IDEM_SHOP__BRANCHES", "bern,basel")

    settings = load_settings(file, ShopSettings)

    assert settings.shop == ShopSection(currency="CHF", branches=("bern", "basel"))


def test_a_required_section_can_be_set_in_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rates(Section):
        rate: Annotated[float, Field(gt=0)]

    class RequiredSettings(Settings):
        rates: Rates

    monkeypatch.setenv("INTEGR8S_IDEM_RATES__RATE", "0.5")

    assert load_settings(settings_type=RequiredSettings).rates.rate == 0.5


def test_a_file_with_a_byte_order_mark_and_crlf_is_read() -> None:
    Path("settings.toml").write_bytes(b'\xef\xbb\xbf[kafka]\r\ntopic_prefix = "shop."\r\n')

    assert load_settings().kafka.topic_prefix == "shop."


def test_a_service_overrides_global_policies() -> None:
    file = written('[idempotency]\nmax_attempts = 9\n[services.billing]\non_store_error = "open"\non_failure = "block"')

    billing = load_settings(file).idempotency_for("billing")

    assert billing.max_attempts == 9
    assert billing.on_store_error is OnStoreError.OPEN
    assert billing.on_failure is OnFailure.BLOCK


def test_a_service_without_a_section_uses_global_policies() -> None:
    settings = load_settings(written("[idempotency]\nmax_attempts = 9"))

    assert settings.idempotency_for("audit") == settings.idempotency
