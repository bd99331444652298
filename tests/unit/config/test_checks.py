"""Contradictory settings are rejected; risky ones cause warnings."""

from __future__ import annotations

import os
from typing import Any

import pytest

from integr8s_idem.config import (
    RedisClusterStoreSettings,
    RedisSentinelStoreSettings,
    Settings,
    check_settings,
    settings_warnings,
)
from integr8s_idem.doctor.remedies import warning_remedy

LONG = {"default_ttl_seconds": 691_200}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of this machine."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)


def settings_from(**tables: Any) -> Settings:
    """Create settings from the tables of a file."""
    return Settings.model_validate(tables)


@pytest.mark.scenario(97)
@pytest.mark.parametrize(
    ("tables", "path", "message"),
    [
        (
            {"services": {"a": {"handler_timeout_seconds": 300}}},
            "services.a.handler_timeout_seconds",
            "= 300 equals idempotency.processing_timeout_seconds = 300: "
            "another worker would take over a handler that is still running; lower the first or raise the second",
        ),
        (
            {"services": {"a": {"drain_timeout_seconds": 61.5}}},
            "services.a.drain_timeout_seconds",
            "= 61.5 exceeds kafka.rebalance_timeout_seconds = 60: the group would continue without a worker whose "
            "handlers are still running; lower the first or raise the second",
        ),
        (
            {"services": {"a": {"retry_initial_seconds": 31}}},
            "services.a.retry_initial_seconds",
            "= 31 exceeds services.a.retry_max_seconds = 30: the first pause would exceed the maximum; "
            "lower the first or raise the second",
        ),
        (
            {"kafka": {"heartbeat_interval_seconds": 16}},
            "kafka.heartbeat_interval_seconds",
            "= 16 exceeds a third of kafka.session_timeout_seconds = 45: two lost heartbeats would end "
            "membership in the group; lower the first or raise the second",
        ),
        (
            {"kafka": {"request_timeout_seconds": 60}},
            "kafka.request_timeout_seconds",
            "= 60 equals kafka.rebalance_timeout_seconds = 60: a rebalance would not wait for a slow "
            "commit; lower the first or raise the second",
        ),
        (
            {"store": {"timeout_seconds": 10}, "idempotency": {"processing_timeout_seconds": 30}},
            "store.timeout_seconds",
            "= 10 is not below a third of idempotency.processing_timeout_seconds = 30: one unanswered renewal "
            "would lose the lease; lower the first or raise the second",
        ),
        (
            {"idempotency": {"default_ttl_seconds": 299}},
            "idempotency.default_ttl_seconds",
            "= 299 is less than idempotency.processing_timeout_seconds = 300: an outcome could expire while a "
            "duplicate waits for it; raise the first or lower the second",
        ),
        (
            {"kafka": {"security_protocol": "SASL_SSL", "sasl_username": "us"}},
            "kafka.sasl_password",
            'must be set with security_protocol = "SASL_SSL"',
        ),
        (
            {"store": {"url": "redis://:x@h/0", "password": "x"}},
            "store.password",
            "is set twice: store.url also contains a password; remove it from the URL",
        ),
        (
            {"store": {"tls_cert_file": "cert.pem"}},
            "store.tls_key_file",
            "must be set together with store.tls_cert_file",
        ),
        (
            {"store": {"kind": "redis-cluster", "urls": ["redis://:x@h", "redis://i"], "password": "x"}},
            "store.password",
            "is set twice: store.urls also contains a password; remove it from the URL",
        ),
        (
            {"store": {"kind": "redis-sentinel", "tls_key_file": "key.pem"}},
            "store.tls_cert_file",
            "must be set together with store.tls_key_file",
        ),
        (
            {"store": {"kind": "mysql", "tls": True, "tls_cert_file": "cert.pem"}},
            "store.tls_key_file",
            "must be set together with store.tls_cert_file",
        ),
        (
            {"store": {"wait_replicas": 1, "wait_timeout_seconds": 2}},
            "store.wait_timeout_seconds",
            "= 2 equals store.timeout_seconds = 2: calls would time out before the replicas do; "
            "lower the first or raise the second",
        ),
        (
            {"services": {"k8s-worker": {}, "k8s_worker": {}}},
            "services.k8s_worker",
            "has the same environment variables as services.k8s-worker; rename one",
        ),
        (
            {"telemetry": {"spans": "otlp"}},
            "telemetry.spans",
            '= "otlp" needs telemetry.otlp_endpoint; write otlp_endpoint = "http://localhost:4317", or spans = "off"',
        ),
    ],
)
def test_a_contradiction_names_both_settings_and_the_remedy(tables: dict[str, Any], path: str, message: str) -> None:
    found = {mistake.path: mistake.message for mistake in check_settings(settings_from(**tables))}

    assert found == {path: message}


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"services": {"a": {"handler_timeout_seconds": 299.9, "drain_timeout_seconds": 59.9}}},
        {"services": {"a": {"retry_initial_seconds": 30}}},
        {"kafka": {"heartbeat_interval_seconds": 15}},
        {"store": {"timeout_seconds": 9.9}, "idempotency": {"processing_timeout_seconds": 30}},
        {"idempotency": {"default_ttl_seconds": 300}},
        {"store": {"wait_timeout_seconds": 2}},
        {"store": {"kind": "memory"}, "idempotency": {"processing_timeout_seconds": 0.1}},
    ],
)
def test_settings_at_their_limits_are_valid(tables: dict[str, Any]) -> None:
    assert check_settings(settings_from(**tables)) == []


@pytest.mark.scenario(97)
def test_all_contradictions_are_reported() -> None:
    settings = settings_from(
        idempotency={"processing_timeout_seconds": 5},
        services={"a": {"handler_timeout_seconds": 6}, "b": {"drain_timeout_seconds": 70}},
        store={"timeout_seconds": 2},
    )

    assert [mistake.path for mistake in check_settings(settings)] == [
        "store.timeout_seconds",
        "services.a.handler_timeout_seconds",
        "services.b.drain_timeout_seconds",
    ]


@pytest.mark.parametrize(
    ("tables", "path"),
    [
        ({"store": {"kind": "memory"}}, "store.kind"),
        ({"idempotency": LONG | {"on_in_progress": "skip"}}, "idempotency.on_in_progress"),
        ({"idempotency": LONG | {"on_store_error": "open"}}, "idempotency.on_store_error"),
        ({"services": {"a": {"on_in_progress": "skip"}}}, "services.a.on_in_progress"),
        ({"services": {"a": {"on_store_error": "open"}}}, "services.a.on_store_error"),
        ({"services": {"a": {"concurrency": 9, "max_in_flight": 8}}}, "services.a.max_in_flight"),
        ({"services": {"a": {"drain_timeout_seconds": 50}}}, "services.a.drain_timeout_seconds"),
        ({"kafka": {"session_timeout_seconds": 5, "heartbeat_interval_seconds": 1}}, "kafka.session_timeout_seconds"),
        pytest.param(
            {"kafka": {"auto_offset_reset": "latest"}}, "kafka.auto_offset_reset", marks=pytest.mark.scenario(69)
        ),
        ({"kafka": {"sasl_password": "x"}}, "kafka.sasl_password"),
        ({"store": {"kind": "sqlite", "lock_timeout_seconds": 5}}, "store.lock_timeout_seconds"),
        ({"store": {"tls_ca_file": "ca.pem"}}, "store.tls_ca_file"),
        ({"store": {"kind": "redis-sentinel", "tls_ca_file": "ca.pem"}}, "store.tls_ca_file"),
        ({"store": {"kind": "postgresql", "tls_ca_file": "ca.pem"}}, "store.tls_ca_file"),
        (
            {"store": {"kind": "redis-cluster", "urls": ["rediss://a", "redis://b"], "tls_ca_file": "ca.pem"}},
            "store.tls_ca_file",
        ),
    ],
)
def test_a_risky_setting_causes_a_warning_only(tables: dict[str, Any], path: str) -> None:
    settings = settings_from(**({"idempotency": LONG} | tables))

    [warning] = settings_warnings(settings)
    assert warning.path == path
    what, cost, remedy = warning_remedy(warning.path, warning.message)
    assert all((what, cost, remedy))
    assert check_settings(settings) == []


@pytest.mark.scenario(98)
def test_a_ttl_below_the_default_retention_of_topics_causes_a_warning() -> None:
    [warning] = settings_warnings(settings_from(idempotency={"default_ttl_seconds": 604_799}))

    assert warning.path == "idempotency.default_ttl_seconds"
    assert "a replay of older events runs them again" in warning.message


@pytest.mark.scenario(98)
def test_a_ttl_of_the_default_retention_of_topics_causes_no_warning() -> None:
    assert settings_warnings(settings_from(idempotency={"default_ttl_seconds": 604_800})) == []


def test_a_result_limit_above_the_item_size_of_dynamodb_causes_a_warning() -> None:
    def warned(**idempotency: object) -> list[str]:
        settings = settings_from(idempotency=LONG | idempotency, store={"kind": "dynamodb"})
        return [warning.path for warning in settings_warnings(settings)]

    assert warned(max_result_size_bytes=407_553) == ["idempotency.max_result_size_bytes"]
    assert warned(max_result_size_bytes=407_552) == []
    assert warned(max_result_size_bytes=407_553, enable_result_caching=False) == []
    assert warned() == []


def test_a_section_of_an_unknown_service_causes_a_warning() -> None:
    settings = settings_from(idempotency=LONG, services={"biling": {}, "k8s_worker": {}, "audit": {}})

    warnings = settings_warnings(settings, ["billing", "k8s-worker"])

    assert {warning.path: warning.message for warning in warnings} == {
        "services.biling": "is not a service of this application: it is ignored; did you mean services.billing?",
        "services.audit": "is not a service of this application: it is ignored; known services: billing, k8s-worker",
    }


@pytest.mark.parametrize("given", ["redis://a:1, redis://b:2", ["redis://a:1", "redis://b:2"]])
def test_cluster_urls_are_a_list_or_a_comma_separated_string(given: object) -> None:
    store = settings_from(store={"kind": "redis-cluster", "urls": given}).store

    assert isinstance(store, RedisClusterStoreSettings)
    assert store.urls == ("redis://a:1", "redis://b:2")


def test_a_sentinel_without_port_has_the_default_port() -> None:
    store = settings_from(store={"kind": "redis-sentinel", "sentinels": ["a", "b:1", "[::1]"]}).store

    assert isinstance(store, RedisSentinelStoreSettings)
    assert store.sentinels == ("a:26379", "b:1", "[::1]:26379")
