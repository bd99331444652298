"""Check for settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from integr8s_idem.config.environment import same_name
from integr8s_idem.config.sections import ServiceSettings
from integr8s_idem.config.store_sections import (
    AnyRedisSettings,
    DynamodbStoreSettings,
    MemoryStoreSettings,
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisClusterStoreSettings,
    RedisSentinelStoreSettings,
    SqliteStoreSettings,
)
from integr8s_idem.config.urls import url_holds_password
from integr8s_idem.errors import SettingsMistake

if TYPE_CHECKING:
    from integr8s_idem.config.settings import Settings

_LEASE: Final = "idempotency.processing_timeout_seconds"
REBALANCE: Final = "kafka.rebalance_timeout_seconds"


@dataclass(frozen=True)
class Contradiction:
    """A mistake in the combination of two settings."""

    path: str
    other: str
    message: str

    @property
    def mistake(self) -> SettingsMistake:
        return SettingsMistake(self.path, self.message)


@dataclass(frozen=True)
class _Value:
    path: str
    number: float


def check_settings(settings: Settings) -> list[SettingsMistake]:
    """Return contradictions that would lose events or handle them twice, in a stable order."""
    return [found.mistake for found in contradictions(settings)]


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """Yield contradictions with both settings involved."""
    yield from _idempotency(settings)
    yield from _kafka(settings)
    yield from _store(settings)
    for name, service in settings.services.items():
        yield from _service(settings, f"services.{name}", service)
    yield from _same_variables(settings)
    telemetry = settings.telemetry
    if telemetry.spans == "otlp" and telemetry.otlp_endpoint is None:
        yield Contradiction(
            "telemetry.spans",
            "telemetry.otlp_endpoint",
            '= "otlp" needs telemetry.otlp_endpoint; write otlp_endpoint = "http://localhost:4317", or spans = "off"',
        )


def _idempotency(settings: Settings) -> Iterator[Contradiction]:
    ttl = _Value("idempotency.default_ttl_seconds", settings.idempotency.default_ttl_seconds)
    lease = _Value(_LEASE, settings.idempotency.processing_timeout_seconds)
    if ttl.number < lease.number:
        yield _compared(ttl, lease, "an outcome could expire while a duplicate waits for it", "raise", "lower")


def _kafka(settings: Settings) -> Iterator[Contradiction]:
    kafka = settings.kafka
    heartbeat = _Value("kafka.heartbeat_interval_seconds", kafka.heartbeat_interval_seconds)
    session = _Value("kafka.session_timeout_seconds", kafka.session_timeout_seconds)
    if 3 * heartbeat.number > session.number:
        yield _compared(heartbeat, session, "two lost heartbeats would end membership in the group", part="a third of ")
    request = _Value("kafka.request_timeout_seconds", kafka.request_timeout_seconds)
    rebalance = _Value(REBALANCE, kafka.rebalance_timeout_seconds)
    if request.number >= rebalance.number:
        yield _compared(request, rebalance, "a rebalance would not wait for a slow commit")
    if kafka.security_protocol.startswith("SASL"):
        for name in ("sasl_username", "sasl_password"):
            if getattr(kafka, name) is None:
                yield Contradiction(
                    f"kafka.{name}",
                    "kafka.security_protocol",
                    f'must be set with security_protocol = "{kafka.security_protocol}"',
                )


def _store(settings: Settings) -> Iterator[Contradiction]:
    store = settings.store
    if isinstance(store, MemoryStoreSettings):
        return
    timeout = _Value("store.timeout_seconds", store.timeout_seconds)
    lease = _Value(_LEASE, settings.idempotency.processing_timeout_seconds)
    if 3 * timeout.number >= lease.number:
        yield _compared(timeout, lease, "one unanswered renewal would lose the lease", part="a third of ")
    if isinstance(store, SqliteStoreSettings):
        if store.path in ("", ":memory:"):
            yield Contradiction(
                "store.path",
                "store.kind",
                f'= "{store.path}" is not a file: records would be lost on exit and invisible to other processes; '
                'set a file, or kind = "memory"',
            )
        return
    if isinstance(store, DynamodbStoreSettings):
        return
    for path, url in urls_of(store):
        if store.password is not None and url_holds_password(url):
            yield Contradiction(
                "store.password", path, f"is set twice: {path} also contains a password; remove it from the URL"
            )
    yield from _tls(store)
    if isinstance(store, AnyRedisSettings):
        yield from _redis(store)


def urls_of(store: PostgresqlStoreSettings | MysqlStoreSettings | AnyRedisSettings) -> Iterator[tuple[str, str]]:
    match store:
        case RedisSentinelStoreSettings():
            return
        case RedisClusterStoreSettings(urls=urls):
            yield from (("store.urls", url) for url in urls)
        case _:
            yield "store.url", store.url


def _tls(store: PostgresqlStoreSettings | MysqlStoreSettings | AnyRedisSettings) -> Iterator[Contradiction]:
    if (store.tls_cert_file is None) != (store.tls_key_file is None):
        given, needed = ("cert", "key") if store.tls_cert_file else ("key", "cert")
        yield Contradiction(
            f"store.tls_{needed}_file", f"store.tls_{given}_file", f"must be set together with store.tls_{given}_file"
        )


def _redis(store: AnyRedisSettings) -> Iterator[Contradiction]:
    wait = _Value("store.wait_timeout_seconds", store.wait_timeout_seconds)
    timeout = _Value("store.timeout_seconds", store.timeout_seconds)
    if store.wait_replicas and wait.number >= timeout.number:
        yield _compared(wait, timeout, "calls would time out before the replicas do")


def _service(settings: Settings, path: str, service: ServiceSettings) -> Iterator[Contradiction]:
    lease = _Value(_LEASE, settings.idempotency.processing_timeout_seconds)
    handler = service.handler_timeout_seconds
    if handler is not None and handler >= lease.number:
        why = "another worker would take over a handler that is still running"
        yield _compared(_Value(f"{path}.handler_timeout_seconds", handler), lease, why)
    drain = _Value(f"{path}.drain_timeout_seconds", service.drain_timeout_seconds)
    rebalance = _Value(REBALANCE, settings.kafka.rebalance_timeout_seconds)
    if drain.number >= rebalance.number:
        yield _compared(drain, rebalance, "the group would continue without a worker whose handlers are still running")
    first = _Value(f"{path}.retry_initial_seconds", service.retry_initial_seconds)
    longest = _Value(f"{path}.retry_max_seconds", service.retry_max_seconds)
    if first.number > longest.number:
        yield _compared(first, longest, "the first pause would exceed the maximum")


def _same_variables(settings: Settings) -> Iterator[Contradiction]:
    seen: dict[str, str] = {}
    for name in settings.services:
        first = seen.setdefault(same_name(name), name)
        if first != name:
            message = f"has the same environment variables as services.{first}; rename one"
            yield Contradiction(f"services.{name}", f"services.{first}", message)


def _compared(
    value: _Value, bound: _Value, why: str, move: str = "lower", other: str = "raise", part: str = ""
) -> Contradiction:
    verb = "equals" if value.number == bound.number else "is less than" if value.number < bound.number else "exceeds"
    if part:
        verb = "is not below"
        if value.number * 3 > bound.number:
            verb = "exceeds"
    return Contradiction(
        value.path,
        bound.path,
        f"= {plain(value.number)} {verb} {part}{bound.path} = {plain(bound.number)}: {why}; "
        f"{move} the first or {other} the second",
    )


def plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
