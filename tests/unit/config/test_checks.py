"""Settings that contradict each other are refused; those that surprise are warned of."""

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
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of this machine."""
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)


def made(**tables: Any) -> Settings:
    """Settings from tables as a file has them."""
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
            "= 61.5 exceeds kafka.rebalance_timeout_seconds = 60: the group would go on without a worker that still "
            "finishes its handlers; lower the first or raise the second",
        ),
        (
            {"services": {"a": {"retry_initial_seconds": 31}}},
            "services.a.retry_initial_seconds",
            "= 31 exceeds services.a.retry_max_seconds = 30: the first pause would be longer than the longest; "
            "lower the first or raise the second",
        ),
        (
            {"kafka": {"heartbeat_interval_seconds": 16}},
            "kafka.heartbeat_interval_seconds",
            "= 16 exceeds a third of kafka.session_timeout_seconds = 45: two lost heartbeats would end the worker's "
            "membership; lower the first or raise the second",
        ),
        (
            {"kafka": {"request_timeout_seconds": 60}},
            "kafka.request_timeout_seconds",
            "= 60 equals kafka.rebalance_timeout_seconds = 60: a rebalance would not wait for the commit of what was "
            "handled; lower the first or raise the second",
        ),
        (
            {"store": {"timeout_seconds": 10}, "idempotency": {"processing_timeout_seconds": 30}},
            "store.timeout_seconds",
            "= 10 is not below a third of idempotency.processing_timeout_seconds = 30: one renewal without an answer "
            "would lose the lease; lower the first or raise the second",
        ),
        (
            {"idempotency": {"default_ttl_seconds": 299}},
            "idempotency.default_ttl_seconds",
            "= 299 is less than idempotency.processing_timeout_seconds = 300: an outcome would be forgotten before a "
            "duplicate has waited for it; raise the first or lower the second",
        ),
        (
            {"kafka": {"security_protocol": "SASL_SSL", "sasl_username": "us"}},
            "kafka.sasl_password",
            'must be given with security_protocol = "SASL_SSL"',
        ),
        (
            {"store": {"url": "redis://:x@h/0", "password": "x"}},
            "store.password",
            "is given twice: store.url holds a password as well; take it out of the url",
        ),
        (
            {"store": {"tls_cert_file": "cert.pem"}},
            "store.tls_key_file",
            "must be given beside store.tls_cert_file",
        ),
        (
            {"store": {"kind": "redis-cluster", "urls": ["redis://:x@h", "redis://i"], "password": "x"}},
            "store.password",
            "is given twice: store.urls holds a password as well; take it out of the url",
        ),
        (
            {"store": {"kind": "redis-sentinel", "tls_key_file": "key.pem"}},
            "store.tls_cert_file",
            "must be given beside store.tls_key_file",
        ),
        (
            {"store": {"kind": "mysql", "tls": True, "tls_cert_file": "cert.pem"}},
            "store.tls_key_file",
            "must be given beside store.tls_cert_file",
        ),
        (
            {"store": {"wait_replicas": 1, "wait_timeout_seconds": 2}},
            "store.wait_timeout_seconds",
            "= 2 equals store.timeout_seconds = 2: a call would end before the replicas have had their time; "
            "lower the first or raise the second",
        ),
        (
            {"services": {"k8s-worker": {}, "k8s_worker": {}}},
            "services.k8s_worker",
            "is taken for services.k8s-worker in the environment; rename one",
        ),
        (
            {"telemetry": {"spans": "otlp"}},
            "telemetry.spans",
            '= "otlp" needs telemetry.otlp_endpoint; write otlp_endpoint = "http://localhost:4317", or spans = "off"',
        ),
    ],
)
def test_a_contradiction_names_both_settings_and_what_to_do(tables: dict[str, Any], path: str, message: str) -> None:
    found = {mistake.path: mistake.message for mistake in check_settings(made(**tables))}

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
def test_settings_at_their_bounds_are_fine(tables: dict[str, Any]) -> None:
    assert check_settings(made(**tables)) == []


@pytest.mark.scenario(97)
def test_contradictions_are_said_at_once() -> None:
    settings = made(
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
def test_what_may_surprise_is_a_warning_and_no_refusal(tables: dict[str, Any], path: str) -> None:
    settings = made(**({"idempotency": LONG} | tables))

    [warning] = settings_warnings(settings)
    assert warning.path == path
    what, cost, remedy = warning_remedy(warning.path, warning.message)
    assert all((what, cost, remedy))
    assert check_settings(settings) == []


@pytest.mark.scenario(98)
def test_a_ttl_below_the_seven_days_that_topics_keep_events_by_default_is_warned_of() -> None:
    [warning] = settings_warnings(made(idempotency={"default_ttl_seconds": 604_799}))

    assert warning.path == "idempotency.default_ttl_seconds"
    assert "a replay of older events runs them again" in warning.message


@pytest.mark.scenario(98)
def test_settings_that_outlive_the_topics_give_no_warning() -> None:
    assert settings_warnings(made(idempotency={"default_ttl_seconds": 604_800})) == []


def test_results_that_an_item_of_dynamodb_cannot_hold_are_warned_of_where_they_are_asked_for() -> None:
    def warned(**idempotency: object) -> list[str]:
        settings = made(idempotency=LONG | idempotency, store={"kind": "dynamodb"})
        return [warning.path for warning in settings_warnings(settings)]

    assert warned(max_result_size_bytes=407_553) == ["idempotency.max_result_size_bytes"]
    assert warned(max_result_size_bytes=407_552) == []
    assert warned(max_result_size_bytes=407_553, enable_result_caching=False) == []
    assert warned() == []


def test_a_section_of_a_service_that_the_application_has_not_is_a_warning() -> None:
    settings = made(idempotency=LONG, services={"biling": {}, "k8s_worker": {}, "audit": {}})

    warnings = settings_warnings(settings, ["billing", "k8s-worker"])

    assert {warning.path: warning.message for warning in warnings} == {
        "services.biling": "is no service of this application: nothing reads it; did you mean services.billing?",
        "services.audit": "is no service of this application: nothing reads it; known are billing, k8s-worker",
    }


@pytest.mark.parametrize("given", ["redis://a:1, redis://b:2", ["redis://a:1", "redis://b:2"]])
def test_the_servers_of_a_cluster_are_a_list_or_one_text(given: object) -> None:
    store = made(store={"kind": "redis-cluster", "urls": given}).store

    assert isinstance(store, RedisClusterStoreSettings)
    assert store.urls == ("redis://a:1", "redis://b:2")


def test_a_sentinel_has_the_usual_port_if_none_is_given() -> None:
    store = made(store={"kind": "redis-sentinel", "sentinels": ["a", "b:1", "[::1]"]}).store

    assert isinstance(store, RedisSentinelStoreSettings)
    assert store.sentinels == ("a:26379", "b:1", "[::1]:26379")
