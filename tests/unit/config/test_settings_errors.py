"""All mistakes in settings are reported at once, with suggestions and without secrets."""

from __future__ import annotations

import os
import re
import time
import traceback
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import AfterValidator, SecretStr, ValidationError

from integr8s_idem.config import Section, Settings, load_settings
from integr8s_idem.config.loading import LARGEST_FILE
from integr8s_idem.errors import SettingsError

SECRET = "hunter2-and-more"
KINDS = '"redis", "redis-cluster", "redis-sentinel", "postgresql", "sqlite", "mysql", "dynamodb" or "memory"'


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove the settings of this machine, and change to an empty working directory."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def mistakes(text: str = "", settings_type: type[Settings] = Settings) -> dict[str, str]:
    """Return the mistakes in a file with this text: messages by path."""
    Path("settings.toml").write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        load_settings(settings_type=settings_type)
    found = {mistake.path: mistake.message for mistake in caught.value.mistakes}
    assert len(found) == len(caught.value.mistakes)
    return found


@pytest.mark.parametrize("share", [0.009, 1e-300])
def test_an_isolation_share_below_a_hundredth_is_rejected(share: float) -> None:
    found = mistakes(f"[services.billing]\nisolation_share = {share}")

    assert found.keys() == {"services.billing.isolation_share"}
    assert "set 0, or a value from 0.01 to 1" in found["services.billing.isolation_share"]


@pytest.mark.parametrize("share", [0, 0.01, 1])
def test_an_isolation_share_of_zero_or_at_least_a_hundredth_is_accepted(share: float) -> None:
    Path("settings.toml").write_text(f"[services.billing]\nisolation_share = {share}", encoding="utf-8")

    assert load_settings().service("billing").isolation_share == share


@pytest.mark.scenario(96)
def test_all_mistakes_are_reported_at_once() -> None:
    found = mistakes(
        "[store]\nurl = 'localhost:6379'\n"
        "[idempotency]\nprocessing_timeout_seconds = 30\ndefault_ttl_secnds = 9\n"
        "[services.billing]\nhandler_timeout_seconds = 60"
    )

    assert found == {
        "store.url": '"localhost:6379" is not a Redis URL; write redis://localhost:6379/0',
        "idempotency.default_ttl_secnds": "unknown setting; did you mean default_ttl_seconds?",
        "services.billing.handler_timeout_seconds": "= 60 exceeds idempotency.processing_timeout_seconds = 30: "
        "another worker would take over a handler that is still running; lower the first or raise the second",
    }


@pytest.mark.scenario(96)
@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        (
            'kafka.session_timeout_seconds = "5min"',
            "kafka.session_timeout_seconds",
            'must be a number of seconds greater than 0, not "5min"',
        ),
        (
            "store.timeout_seconds = 0",
            "store.timeout_seconds",
            "must be a number of seconds greater than 0, not 0",
        ),
        (
            "store.timeout_seconds = inf",
            "store.timeout_seconds",
            "must be a number of seconds of at most 2147483, not Infinity",
        ),
        (
            "idempotency.max_attempts = true",
            "idempotency.max_attempts",
            "must be a whole number of at least 1, not true",
        ),
        (
            "store.timeout_seconds = true",
            "store.timeout_seconds",
            "must be a number of seconds greater than 0, not true",
        ),
        ("services.a.concurrency = 1.5", "services.a.concurrency", "must be a whole number from 1 to 10000, not 1.5"),
        (
            'services.a.ordering = "keys"',
            "services.a.ordering",
            'must be "partition", "key" or "none", not "keys"',
        ),
        ('idempotency.on_failure = "x"', "idempotency.on_failure", 'must be "retry" or "block", not "x"'),
        ('idempotency.hash_keys = "maybe"', "idempotency.hash_keys", 'must be true or false, not "maybe"'),
        ('kafka.bootstrap_servers = ["a:1"]', "kafka.bootstrap_servers", "must be a string, not a list"),
        (
            'services.a.topics = "orders"',
            "services.a.topics",
            'must be a list of strings with at least one item, not "orders"',
        ),
        (
            "services.a.topics = []",
            "services.a.topics",
            "must be a list of strings with at least one item, not an empty list",
        ),
        ('kafka = "localhost"', "kafka", "must be a table of settings, not a string"),
        (
            'store.kind = "oracle"',
            "store.kind",
            f'must be {KINDS}, not "oracle"',
        ),
        ('services."a b".concurrency = 1', "services.a b", "must have a name that matches ^[A-Za-z0-9._-]{1,100}$"),
        (
            'kafka.bootstrap_servers = "kafka://a:1"',
            "kafka.bootstrap_servers",
            '"kafka://a:1" is not a broker address; write host:port, as in a:1',
        ),
        (
            'kafka.bootstrap_servers = "a:b"',
            "kafka.bootstrap_servers",
            '"a:b" is not a broker address; write host:port, as in a:9092',
        ),
        (
            'services.a.topics = ["a b"]',
            "services.a.topics",
            'each must be a string that matches ^[A-Za-z0-9._-]{1,249}$, not "a b"',
        ),
        (
            'telemetry.otlp_endpoint = "localhost:4317"',
            "telemetry.otlp_endpoint",
            '"localhost:4317" is not a collector URL; write http://localhost:4317',
        ),
        (
            'store.url = "redis://h:6379/sessions"',
            "store.url",
            '"redis://h:6379/sessions" names the database "sessions", which is not a number; write redis://h:6379/0',
        ),
        (
            'store.url = "redis://h:port/0"',
            "store.url",
            "has an invalid host or port; write redis://localhost:6379/0",
        ),
        (
            'store.kind = "redis-cluster"\nstore.urls = ["redis://h:1", "unix:///run/redis.sock"]',
            "store.urls",
            "contains a socket, but a Redis Cluster is reached over TCP; write redis://localhost:6379",
        ),
        (
            'store.kind = "redis-cluster"\nstore.urls = "redis://h:1/3"',
            "store.urls",
            '"redis://h:1/3" names a database, but a Redis Cluster has only one; remove it',
        ),
        (
            'store.kind = "redis-sentinel"\nstore.sentinels = ["redis://h:1/0"]',
            "store.sentinels",
            '"redis://h:1/0" is not a Sentinel address; write h:26379',
        ),
        (
            "store.kind = 'postgresql'\nstore.url = 'postgresql://h/d?sslmode=require'",
            "store.url",
            'has the option "sslmode", which is not supported; remove it: set store.tls = true for TLS, '
            "with store.tls_ca_file for a custom CA",
        ),
        (
            "store.kind = 'mysql'\nstore.url = 'mysql://h/d?connect_timeout=3'",
            "store.url",
            'has the option "connect_timeout", which is not supported; remove it; known: unix_socket, user, password',
        ),
        ("store.password = 5551234", "store.password", "must be a string"),
        ("concurrency = 3", "concurrency", "unknown setting; did you mean services.<name>.concurrency?"),
        ("kafka.xyz = 3\nstore.kind = 'memory'", "kafka.xyz", "unknown setting"),
        ("store.kind = 'memory'\nstore.ur = 'x'", "store.ur", "unknown setting; known settings: kind"),
        ("store.kind = 'memory'\nstore.url = 'x'", "store.url", 'cannot be used with kind = "memory"; remove it'),
        (
            '[store]\nkind = "postgresql"\nurl = "postgresql://u:hunter2@db:5432"',
            "store.url",
            '"postgresql://***@db:5432" does not name a database; write postgresql://db:5432/postgres',
        ),
        (
            '[store]\nkind = "mysql"\nurl = "mariadb://db/?charset=utf8mb4"',
            "store.url",
            '"mariadb://db/?charset=utf8mb4" does not name a database; write mariadb://db/idempotency',
        ),
        (
            '[store]\nkind = "mysql"\nlock_timeout_seconds = 0.5',
            "store.lock_timeout_seconds",
            "must be a whole number of at least 1, not 0.5",
        ),
    ],
)
def test_a_mistake_suggests_a_correction(text: str, path: str, message: str) -> None:
    assert mistakes(text) == {path: message}


@pytest.mark.scenario(96)
def test_a_mistake_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_SERVICES__BILLING__CONCURRENCY", "many")
    monkeypatch.setenv("INTEGR8S_IDEM_STORE__PASSWRD", SECRET)
    monkeypatch.setenv("INTEGR8S_IDEM_STORE_PASSWORD", SECRET)

    assert mistakes() == {
        "services.billing.concurrency": 'must be a whole number from 1 to 10000, not "many" '
        "(set by INTEGR8S_IDEM_SERVICES__BILLING__CONCURRENCY)",
        "store.passwrd": "unknown setting INTEGR8S_IDEM_STORE__PASSWRD; did you mean INTEGR8S_IDEM_STORE__PASSWORD?",
        "store_password": "unknown setting INTEGR8S_IDEM_STORE_PASSWORD; did you mean INTEGR8S_IDEM_STORE__PASSWORD?",
    }


def test_a_setting_below_a_scalar_setting_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_KAFKA__CLIENT_ID__X", "1")

    assert mistakes() == {"kafka.client_id": "must be a string, not a table"}


def test_a_contradiction_that_involves_a_mistake_is_not_reported() -> None:
    """The lease is unknown, not its default."""
    found = mistakes('idempotency.processing_timeout_seconds = "5min"\nservices.a.handler_timeout_seconds = 400')

    assert list(found) == ["idempotency.processing_timeout_seconds"]


def test_a_contradiction_that_involves_a_misspelled_setting_is_not_reported() -> None:
    found = mistakes("idempotency.processing_timout_seconds = 900\nservices.a.handler_timeout_seconds = 400")

    assert list(found) == ["idempotency.processing_timout_seconds"]


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("store.kind = 3\nstore.url = 5\nstore.foo = 1", ["store.foo", "store.kind", "store.url"]),
        ('services.a.topics = ["b", "c d"]', ["services.a.topics"]),
        ("services.a.concurrency = 0", ["services.a.concurrency"]),
    ],
)
def test_a_mistake_does_not_hide_others(text: str, paths: list[str]) -> None:
    found = mistakes(f"{text}\nservices.a.retry_initial_seconds = 60")

    assert sorted(found) == sorted([*paths, "services.a.retry_initial_seconds"])


def test_a_missing_setting_of_the_application_does_not_hide_contradictions() -> None:
    class Shop(Section):
        currency: str

    class ShopSettings(Settings):
        shop: Shop

    found = mistakes("services.a.retry_initial_seconds = 60", ShopSettings)

    assert list(found) == ["shop", "services.a.retry_initial_seconds"]


def test_a_misspelled_service_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTEGR8S_IDEM_SERVICES__BILING__CONCURRENCY", "3")

    with pytest.raises(SettingsError) as caught:
        load_settings(services=["billing"])

    assert [mistake.message for mistake in caught.value.mistakes] == [
        "is not a service of this application; did you mean services.billing? "
        "(set by INTEGR8S_IDEM_SERVICES__BILING__CONCURRENCY)"
    ]


@pytest.mark.parametrize(
    "text",
    ["[services.audit]", "[services.billing-eu]", "[services.k8s-worker-2]", "[services.billing]\n[services.biling]"],
)
def test_sections_of_other_applications_in_a_shared_file_are_accepted(text: str) -> None:
    Path("settings.toml").write_text(text)

    load_settings(services=["billing", "k8s-worker-1"])


@pytest.mark.scenario(96, 104)
@pytest.mark.parametrize(
    "text",
    [
        f'store.url = "redis://user:{SECRET}@h:6379/x"',
        f'store.url = "http://user:{SECRET}@h:6379"',
        f'store.url = "http://user:{SECRET}/@h:6379"',
        f'store.url = "redis://user:12/{SECRET}@localhost/0"',
        f'store.url = "redis://user:p@ss/{SECRET}@localhost/0"',
        f'store.url = "redis://user:{SECRET}/0"',
        f'store.url = "redis://user:{SECRET}/12@localhost/0"',
        f'store.url = "h:6379?password={SECRET}"',
        f'store.url = "redis://:{SECRET}@h:port/0"',
        f'store.pasword = "{SECRET}"',
        f'store.password = ["{SECRET}"]',
        f"store.password = {len(SECRET) * 1_111_111}",
        f'store.password = {{ value = "{SECRET}" }}',
        f'store = "redis://:{SECRET}@h/0"',
        f'store.timeout_seconds = "redis://:{SECRET}@h/0"',
        f'store.password = "{SECRET}"\nstore.url = "redis://:{SECRET}@h/0"',
        f'store.password = "{SECRET}',
        f"store.password = {SECRET}",
        f'kafka.bootstrap_servers = "kafka://u:{SECRET}@h:1"',
        f'telemetry.otlp_endpoint = "ftp://u:{SECRET}@h:1"',
        f'telemetry.otlp_endpoint = "ftp://u:{SECRET}/1@h:1"',
    ],
)
def test_no_error_shows_a_secret(text: str) -> None:
    Path("settings.toml").write_text(text)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert SECRET not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)
    assert caught.value.__context__ is None or SECRET not in repr(caught.value.__context__)


@pytest.mark.scenario(104)
def test_errors_of_settings_created_directly_show_no_secret() -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"store": {"password": [SECRET]}})

    assert SECRET not in str(caught.value)


def test_a_message_of_an_applications_validator_does_not_show_its_secret() -> None:
    def refuse(value: SecretStr) -> SecretStr:
        raise ValueError(f"{value.get_secret_value()} is too short")

    class Vault(Section):
        key: Annotated[SecretStr, AfterValidator(refuse)]

    class VaultSettings(Settings):
        vault: Vault

    assert mistakes(f'vault.key = "{SECRET}"', VaultSettings) == {"vault.key": "*** is too short"}


def test_a_missing_required_setting_is_reported_with_its_type() -> None:
    class Shop(Section):
        currency: str
        rate_seconds: float

    class ShopSettings(Settings):
        shop: Shop

    assert mistakes("[shop]\nrate_seconds = 'x'", ShopSettings) == {
        "shop.currency": "must be set: a string",
        "shop.rate_seconds": 'must be a number of seconds, not "x"',
    }
    assert mistakes("", ShopSettings) == {"shop": "must be set: a table of settings"}


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ('path = "x.db"', "store.path", 'cannot be used with kind = "redis", the default; write kind = "sqlite"'),
        (
            'master_name = "x"',
            "store.master_name",
            'cannot be used with kind = "redis", the default; write kind = "redis-sentinel"',
        ),
        (
            'url = "postgresql://u:x@h/db"',
            "store.url",
            '"postgresql://***@h/db" is not a Redis URL; write kind = "postgresql"',
        ),
        ('url = "mariadb://h/db"', "store.url", '"mariadb://h/db" is not a Redis URL; write kind = "mysql"'),
        (
            'url = "sqlite:///x.db"',
            "store.url",
            '"sqlite:///x.db" is not a Redis URL; write kind = "sqlite" and path = "x.db" instead of url',
        ),
        (
            'kind = "postgresql"\nurl = "redis://h/0"',
            "store.url",
            '"redis://h/0" is not a PostgreSQL URL; write kind = "redis"',
        ),
    ],
)
def test_settings_of_another_kind_of_store_suggest_that_kind(text: str, path: str, message: str) -> None:
    assert mistakes(f"[store]\n{text}") == {path: message}


@pytest.mark.parametrize(
    ("text", "kind", "meant"),
    [
        ('kind = "postgres"\nurl = "postgresql://h/d"\npurge_interval_seconds = 3', "postgres", "postgresql"),
        ('kind = "Sqlite"\npath = "x.db"', "Sqlite", "sqlite"),
        ('kind = "mariadb"\nurl = "mysql://h/d"', "mariadb", "mysql"),
    ],
)
def test_a_misspelled_kind_is_the_only_mistake(text: str, kind: str, meant: str) -> None:
    assert mistakes(f"[store]\n{text}") == {"store.kind": f'must be {KINDS}, not "{kind}"; did you mean "{meant}"?'}


def test_settings_next_to_a_misspelled_kind_are_validated_as_the_kind_that_was_meant() -> None:
    found = mistakes('[store]\nkind = "postgres"\nurl = "redis://h"\npath = "x"')

    assert found["store.path"] == 'cannot be used with kind = "postgresql"; remove it'
    assert found["store.url"].startswith('"redis://h" is not a PostgreSQL URL')


def test_settings_next_to_an_unknown_kind_are_not_validated_as_another_kind() -> None:
    assert list(mistakes('[store]\nkind = "oracle"\nurl = "oracle://h"\npath = "x"')) == ["store.kind"]


def test_a_setting_of_several_types_is_one_mistake() -> None:
    class Shop(Section):
        size: int | tuple[int, int] = 1

    class ShopSettings(Settings):
        shop: Shop = Shop()

    assert mistakes('shop.size = "x"', ShopSettings) == {"shop.size": 'must be a whole number or a list, not "x"'}


@pytest.mark.scenario(96)
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (b"[kafka]\nclient_id = x\n", "line 2, column 13  is not valid TOML: invalid value; put strings in quotes"),
        (b'[kafka]\nclient_id = "x\n', "line 2, column 15  is not valid TOML: "),
        (b"[kafka\n", "line 1, column 7  is not valid TOML: "),
        (b"[kafka]\nclient_id = ", "line 2  is not valid TOML: the file ends where a value is expected"),
        (b'[kafka]\nclient_id = """\n\n', "line 2  is not valid TOML: the file ends too early: unterminated string"),
        (b"[kafka]\nclient_id = '\xff'\n", "line 2  contains bytes that are not valid UTF-8; save the file as UTF-8"),
    ],
)
def test_invalid_toml_is_reported_with_its_position(content: bytes, shown: str) -> None:
    Path("settings.toml").write_bytes(content)

    with pytest.raises(SettingsError, match=re.escape(f"settings.toml: 1 mistake\n  {shown}")):
        load_settings()


@pytest.mark.parametrize("endless", [True, False])
def test_a_file_that_is_too_large_is_rejected_without_reading_all_of_it(tmp_path: Path, endless: bool) -> None:
    dump = tmp_path / "dump"
    with dump.open("wb") as file:
        file.truncate(LARGEST_FILE + 1)

    with pytest.raises(SettingsError, match="is larger than 1000000 bytes, the limit for settings"):
        load_settings(Path("/dev/zero") if endless else dump)


def test_a_missing_file_is_reported_with_the_command_that_creates_one() -> None:
    with pytest.raises(SettingsError, match=r"does not exist; write one: integr8s-idem settings example > prod\.toml"):
        load_settings(Path("prod.toml"))


@pytest.mark.parametrize("has_writer", [False, True])
def test_a_pipe_instead_of_a_file_is_reported_at_once(tmp_path: Path, has_writer: bool) -> None:
    pipe = tmp_path / "settings.toml"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR) if has_writer else None

    with pytest.raises(SettingsError, match="file  is a pipe, or a device that has nothing to read; use a regular"):
        load_settings(pipe)
    if writer is not None:
        os.close(writer)


def test_a_terminal_instead_of_a_file_is_reported_at_once() -> None:
    controller, terminal = os.openpty()

    with pytest.raises(SettingsError, match="file  is a pipe, or a device that has nothing to read; use a regular"):
        load_settings(Path(os.ttyname(terminal)))
    os.close(controller)
    os.close(terminal)


def test_an_empty_device_is_an_empty_file() -> None:
    assert load_settings(Path(os.devnull)) == Settings()


def test_a_folder_instead_of_a_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        load_settings(tmp_path)


@pytest.mark.scenario(96)
@pytest.mark.parametrize(
    ("content", "path", "message"),
    [
        ("x = " + "[" * 100_000, "file", "is nested too deeply"),
        ("x = " + "{a = " * 5_000, "file", "is nested too deeply"),
        ("x = " + "9" * 5_000, "file", "contains a number with too many digits"),
        (
            "services.a.max_attempts = 0x" + "f" * 5_000,
            "services.a.max_attempts",
            "must be a whole number of at most 2147483647, not a 20000-bit number",
        ),
        (
            "kafka.session_timeout_seconds = 1" + "0" * 400,
            "kafka.session_timeout_seconds",
            "must be a number of seconds of at most 2147483, not a 1329-bit number",
        ),
        (
            "store.kind = 0x" + "f" * 5_000,
            "store.kind",
            f"must be {KINDS}, not a 20000-bit number",
        ),
        ('store.url = "redis://h\\u0000/0"', "store.url", "contains spaces or invisible characters; write"),
        (
            'telemetry.otlp_endpoint = "http://h\\u202e"',
            "telemetry.otlp_endpoint",
            "contains spaces or invisible characters",
        ),
    ],
    ids=["lists", "tables", "digits", "hexadecimal", "seconds", "kind", "zero byte", "right to left"],
)
def test_a_hostile_file_is_reported_as_one_mistake(content: str, path: str, message: str) -> None:
    found = mistakes(content)

    assert list(found) == [path]
    assert found[path].startswith(message)


@pytest.mark.scenario(96)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KAFKA", "[" * 100_000),
        ("KAFKA", '{"client_id": "a", "client_id": "b"}'),
        ("KAFKA", '{"session_timeout_seconds": ' + "9" * 5_000 + "}"),
        ("KAFKA__SESSION_TIMEOUT_SECONDS", "\udcff"),
        ("KAFKA__SESSION_TIMEOUT_SECONDS", "\x1b[2J"),
        ("KAFKA__X\udcff", "1"),
        ("SECRETS_DIR", "/nowhere/\udcff"),
    ],
    ids=["deep", "duplicate", "digits", "invalid utf-8", "escape", "name", "folder"],
)
def test_a_hostile_variable_is_reported_as_a_printable_mistake(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"INTEGR8S_IDEM_{name}", value)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert len(caught.value.mistakes) == 1
    assert all(line.isprintable() for line in str(caught.value).splitlines())


@pytest.mark.scenario(96)
def test_arbitrary_names_are_shown_on_one_short_line() -> None:
    text = '"\\u202e" = 1\n"a\\nb" = 1\n' + "x" * 100_000 + " = 1"

    shown = list(mistakes(text))

    assert shown[:2] == ["\\u202e", "a\\nb"]
    assert len(shown[2]) == 201


def test_three_thousand_mistakes_are_reported_quickly() -> None:
    started = time.thread_time()

    found = mistakes("\n".join(f"k{number} = 1" for number in range(3_000)))

    assert len(found) == 3_000
    assert time.thread_time() - started < 5
