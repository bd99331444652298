"""Discovery of the embedded servers of a running worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from integr8s_idem.config import PostgresqlStoreSettings, RedisStoreSettings, SqliteStoreSettings
from integr8s_idem.embedded import load_embedded_settings, running_servers
from integr8s_idem.embedded.discovery import FOLDER, announced_servers
from integr8s_idem.errors import ApplicationError

SERVERS: Mapping[str, Mapping[str, Any]] = {
    "kafka": {"bootstrap_servers": "localhost:7", "session_timeout_seconds": 6.0, "heartbeat_interval_seconds": 1.0},
    "store": {"kind": "redis", "url": "unix:///embedded.sock"},
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def files() -> list[str]:
    """All but what git needs to pass the folder over."""
    return [file.name for file in FOLDER.iterdir() if file.name != ".gitignore"]


def test_servers_are_found_only_while_they_run() -> None:
    with announced_servers(SERVERS):
        found = running_servers()
    left = files()
    with pytest.raises(ApplicationError, match="no embedded servers found"):
        running_servers()

    assert found.sections == SERVERS
    assert found.process == os.getpid()
    assert left == []


def test_settings_are_those_of_the_file_with_the_servers_addresses() -> None:
    Path("settings.toml").write_text(
        '[kafka]\nsecurity_protocol = "SASL_SSL"\nsasl_username = "u"\nsasl_password = "p"\ntopic_prefix = "shop."\n'
        '[store]\nurl = "rediss://prod/0"\ntls_ca_file = "ca.pem"\n[idempotency]\nkey_prefix = "shop"'
    )

    with announced_servers(SERVERS):
        settings = load_embedded_settings()

    assert (settings.kafka.bootstrap_servers, settings.kafka.topic_prefix) == ("localhost:7", "shop.")
    assert (settings.kafka.security_protocol, settings.kafka.sasl_username) == ("PLAINTEXT", None)
    assert settings.store == RedisStoreSettings(url="unix:///embedded.sock")
    assert settings.idempotency.key_prefix == "shop"


def test_a_sqlite_store_is_kept() -> None:
    Path("settings.toml").write_text('[store]\nkind = "sqlite"\npath = "shop.db"')

    with announced_servers({"kafka": SERVERS["kafka"]}):
        store = load_embedded_settings().store

    assert isinstance(store, SqliteStoreSettings)


def test_other_stores_are_replaced_by_the_embedded_redis() -> None:
    Path("settings.toml").write_text('[store]\nkind = "postgresql"\nurl = "postgresql://db/shop"')

    with announced_servers(SERVERS):
        store = load_embedded_settings().store

    assert not isinstance(store, PostgresqlStoreSettings)
    assert isinstance(store, RedisStoreSettings)


def test_several_workers_in_one_folder_are_an_error_that_lists_them() -> None:
    others = {**SERVERS, "kafka": {"bootstrap_servers": "localhost:8"}}

    with announced_servers(SERVERS), announced_servers(others), pytest.raises(ApplicationError) as caught:
        running_servers()

    message = str(caught.value)
    assert "2 workers" in message
    assert "INTEGR8S_IDEM_KAFKA__BOOTSTRAP_SERVERS=localhost:7 INTEGR8S_IDEM_STORE__KIND=redis" in message
    assert "INTEGR8S_IDEM_KAFKA__BOOTSTRAP_SERVERS=localhost:8" in message


def test_a_worker_that_ends_removes_only_its_own_file() -> None:
    others = {**SERVERS, "kafka": {"bootstrap_servers": "localhost:8"}}

    with announced_servers(SERVERS):
        with announced_servers(others):
            pass
        found = running_servers()

    assert found.sections == SERVERS


TELLS = """
import sys
from integr8s_idem.embedded.discovery import announced_servers
with announced_servers({"kafka": {"bootstrap_servers": "localhost:9"}}):
    print("announced", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_process() -> Iterator[subprocess.Popen[str]]:
    """A process that announces its servers."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", TELLS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "announced\n"
    with process:
        yield process
        process.kill()


def test_another_process_is_found_until_it_is_killed(other_process: subprocess.Popen[str]) -> None:
    found = running_servers()
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    left = files()
    with pytest.raises(ApplicationError, match="no embedded servers found"):
        running_servers()

    assert found.process == other_process.pid
    assert len(left) == 1
    assert files() == []


def test_git_ignores_the_folder() -> None:
    with announced_servers(SERVERS):
        assert (FOLDER / ".gitignore").read_text() == "*\n"


def test_only_its_owner_can_read_the_file() -> None:
    with announced_servers(SERVERS) as file:
        assert file.path.stat().st_mode & 0o777 == 0o600
