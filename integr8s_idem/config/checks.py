"""Settings that contradict each other: refused, or warned of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from typing import TYPE_CHECKING, Final

from integr8s_idem.config.environment import same_name
from integr8s_idem.config.idempotency import OnInProgress, OnStoreError
from integr8s_idem.config.schema_shape import Path
from integr8s_idem.config.sections import (
    MOST_RESULT_BYTES,
    AnyRedisSettings,
    DynamodbStoreSettings,
    MemoryStoreSettings,
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisClusterStoreSettings,
    RedisSentinelStoreSettings,
    RedisStoreSettings,
    ServiceSettings,
    SqliteStoreSettings,
    StoreSettings,
)
from integr8s_idem.config.urls import url_holds_password
from integr8s_idem.errors import SettingsMistake

if TYPE_CHECKING:
    from integr8s_idem.config.settings import Settings

KAFKA_RETENTION_SECONDS: Final = 7 * 24 * 3600
"""How long topics keep events unless told otherwise (retention.ms)."""
_SESSION_BOUNDS: Final = (6.0, 1800.0)
"""What brokers allow a session timeout unless told otherwise (group.min/max.session.timeout.ms)."""
_NEAR: Final = 0.8
"""How alike two words are that differ by a slip: one letter in five."""
_LEASE: Final = "idempotency.processing_timeout_seconds"
_REBALANCE: Final = "kafka.rebalance_timeout_seconds"


@dataclass(frozen=True)
class Contradiction:
    """A mistake that two settings make together."""

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
    """Every contradiction that would lose events or handle them twice, in an order that stays.  Empty: fine."""
    return [found.mistake for found in contradictions(settings)]


def contradictions(settings: Settings) -> Iterator[Contradiction]:
    """As `check_settings`, with the settings that each rests on."""
    yield from _idempotency(settings)
    yield from _kafka(settings)
    yield from _store(settings)
    for name, service in settings.services.items():
        yield from _service(settings, f"services.{name}", service)
    yield from _alike(settings)
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
        yield _compared(
            ttl, lease, "an outcome would be forgotten before a duplicate has waited for it", "raise", "lower"
        )


def _kafka(settings: Settings) -> Iterator[Contradiction]:
    kafka = settings.kafka
    heartbeat = _Value("kafka.heartbeat_interval_seconds", kafka.heartbeat_interval_seconds)
    session = _Value("kafka.session_timeout_seconds", kafka.session_timeout_seconds)
    if 3 * heartbeat.number > session.number:
        yield _compared(heartbeat, session, "two lost heartbeats would end the worker's membership", part="a third of ")
    request = _Value("kafka.request_timeout_seconds", kafka.request_timeout_seconds)
    rebalance = _Value(_REBALANCE, kafka.rebalance_timeout_seconds)
    if request.number >= rebalance.number:
        yield _compared(request, rebalance, "a rebalance would not wait for the commit of what was handled")
    if kafka.security_protocol.startswith("SASL"):
        for name in ("sasl_username", "sasl_password"):
            if getattr(kafka, name) is None:
                yield Contradiction(
                    f"kafka.{name}",
                    "kafka.security_protocol",
                    f'must be given with security_protocol = "{kafka.security_protocol}"',
                )


def _store(settings: Settings) -> Iterator[Contradiction]:
    store = settings.store
    if isinstance(store, MemoryStoreSettings):
        return
    timeout = _Value("store.timeout_seconds", store.timeout_seconds)
    lease = _Value(_LEASE, settings.idempotency.processing_timeout_seconds)
    if 3 * timeout.number >= lease.number:
        yield _compared(timeout, lease, "one renewal without an answer would lose the lease", part="a third of ")
    if isinstance(store, SqliteStoreSettings):
        if store.path in ("", ":memory:"):
            yield Contradiction(
                "store.path",
                "store.kind",
                f'= "{store.path}" is no file: records would be lost at exit, and no other process would know them; '
                'give a file, or write kind = "memory"',
            )
        return
    if isinstance(store, DynamodbStoreSettings):
        return
    for path, url in _urls(store):
        if store.password is not None and url_holds_password(url):
            yield Contradiction(
                "store.password", path, f"is given twice: {path} holds a password as well; take it out of the url"
            )
    yield from _tls(store)
    if isinstance(store, AnyRedisSettings):
        yield from _redis(store)


def _urls(store: PostgresqlStoreSettings | MysqlStoreSettings | AnyRedisSettings) -> Iterator[tuple[str, str]]:
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
            f"store.tls_{needed}_file", f"store.tls_{given}_file", f"must be given beside store.tls_{given}_file"
        )


def _redis(store: AnyRedisSettings) -> Iterator[Contradiction]:
    wait = _Value("store.wait_timeout_seconds", store.wait_timeout_seconds)
    timeout = _Value("store.timeout_seconds", store.timeout_seconds)
    if store.wait_replicas and wait.number >= timeout.number:
        yield _compared(wait, timeout, "a call would end before the replicas have had their time")


def _service(settings: Settings, path: str, service: ServiceSettings) -> Iterator[Contradiction]:
    lease = _Value(_LEASE, settings.idempotency.processing_timeout_seconds)
    handler = service.handler_timeout_seconds
    if handler is not None and handler >= lease.number:
        why = "another worker would take over a handler that is still running"
        yield _compared(_Value(f"{path}.handler_timeout_seconds", handler), lease, why)
    drain = _Value(f"{path}.drain_timeout_seconds", service.drain_timeout_seconds)
    rebalance = _Value(_REBALANCE, settings.kafka.rebalance_timeout_seconds)
    if drain.number >= rebalance.number:
        yield _compared(drain, rebalance, "the group would go on without a worker that still finishes its handlers")
    first = _Value(f"{path}.retry_initial_seconds", service.retry_initial_seconds)
    longest = _Value(f"{path}.retry_max_seconds", service.retry_max_seconds)
    if first.number > longest.number:
        yield _compared(first, longest, "the first pause would be longer than the longest")


def _alike(settings: Settings) -> Iterator[Contradiction]:
    seen: dict[str, str] = {}
    for name in settings.services:
        twin = seen.setdefault(same_name(name), name)
        if twin != name:
            yield Contradiction(
                f"services.{name}", f"services.{twin}", f"is taken for services.{twin} in the environment; rename one"
            )


def settings_warnings(settings: Settings, services: Iterable[str] = ()) -> list[SettingsMistake]:
    """What is allowed and may still surprise, that of single services last; in an order that stays.

    Args:
        services: Those of the application, if known.
    """
    names = list(services)
    return [
        *_warned_globally(settings),
        *(warning for name, own in settings.services.items() for warning in _warned_of_service(settings, name, own)),
        *(_unknown_service(name, names) for name in settings.services if names and not _is_among(name, names)),
    ]


def _warned_globally(settings: Settings) -> Iterator[SettingsMistake]:
    idempotency, kafka = settings.idempotency, settings.kafka
    ttl = idempotency.default_ttl_seconds
    if ttl < KAFKA_RETENTION_SECONDS:
        yield SettingsMistake(
            "idempotency.default_ttl_seconds",
            f"= {_plain(ttl)} is less than the {KAFKA_RETENTION_SECONDS} (7 days) that topics keep events by default: "
            "a replay of older events runs them again; raise it, or lower retention.ms of the topics",
        )
    if isinstance(settings.store, MemoryStoreSettings):
        yield SettingsMistake(
            "store.kind", '= "memory" is of one process: it forgets all at exit, and knows nothing of other processes'
        )
    yield from _warned_of_policies("idempotency", idempotency.on_in_progress, idempotency.on_store_error)
    least, most = _SESSION_BOUNDS
    if not least <= kafka.session_timeout_seconds <= most:
        yield SettingsMistake(
            "kafka.session_timeout_seconds",
            f"= {_plain(kafka.session_timeout_seconds)} is outside of the {_plain(least)} to {_plain(most)} seconds "
            "that brokers allow by default: with these they let no worker into its group",
        )
    if kafka.auto_offset_reset == "latest":
        yield SettingsMistake(
            "kafka.auto_offset_reset",
            '= "latest" begins a new group at the end of its topics: events that came before that are skipped',
        )
    if kafka.sasl_password is not None and not kafka.security_protocol.startswith("SASL"):
        yield SettingsMistake(
            "kafka.sasl_password",
            f'is not used with security_protocol = "{kafka.security_protocol}": the brokers are not told who we are; '
            "write SASL_SSL?",
        )
    if settings.replay.unsigned == "trust":
        yield SettingsMistake(
            "replay.unsigned",
            '= "trust" lets every producer run completed work again, and keep events from handlers and groups, by a '
            "header; set replay.secret instead",
        )
    yield from _warned_of_store(settings.store)
    yield from _warned_of_results(settings)


def _warned_of_results(settings: Settings) -> Iterator[SettingsMistake]:
    own = settings.idempotency
    # The default is more than that, too: who has set nothing has not asked for so much.
    asked = own.enable_result_caching and "max_result_size_bytes" in own.model_fields_set
    if isinstance(settings.store, DynamodbStoreSettings) and asked and own.max_result_size_bytes > MOST_RESULT_BYTES:
        yield SettingsMistake(
            "idempotency.max_result_size_bytes",
            f"= {own.max_result_size_bytes} is more than the {MOST_RESULT_BYTES} bytes that an item of DynamoDB has "
            "for a result and its media type: a larger one is dropped, and a duplicate gets no answer; lower it, "
            "return a reference, or take another kind of store",
        )


def _warned_of_store(store: StoreSettings) -> Iterator[SettingsMistake]:
    if isinstance(store, RedisSentinelStoreSettings | PostgresqlStoreSettings | MysqlStoreSettings) and not store.tls:
        for name in ("tls_ca_file", "tls_cert_file"):
            if getattr(store, name) is not None:
                yield SettingsMistake(
                    f"store.{name}",
                    "is not used without store.tls = true: what goes to the store and back can be read on the way; "
                    "set that, or take this out",
                )
    match store:
        case SqliteStoreSettings() | PostgresqlStoreSettings() | MysqlStoreSettings():
            if store.lock_timeout_seconds >= store.timeout_seconds:
                yield SettingsMistake(
                    "store.lock_timeout_seconds",
                    f"= {_plain(store.lock_timeout_seconds)} is not below store.timeout_seconds = "
                    f"{_plain(store.timeout_seconds)}: a record that another process holds looks like a store that is "
                    "down; lower the first or raise the second",
                )
        case RedisStoreSettings(tls_ca_file=str()) | RedisClusterStoreSettings(tls_ca_file=str()):
            for path, url in _urls(store):
                if not url.startswith("rediss://"):
                    yield SettingsMistake(
                        "store.tls_ca_file",
                        f"is not used, as {path} does not start with rediss://: what goes to the store and back can be "
                        "read on the way",
                    )
                    break


def _warned_of_service(settings: Settings, name: str, service: ServiceSettings) -> Iterator[SettingsMistake]:
    path = f"services.{name}"
    yield from _warned_of_policies(path, service.on_in_progress, service.on_store_error)
    if service.max_in_flight < service.concurrency:
        yield SettingsMistake(
            f"{path}.max_in_flight",
            f"= {service.max_in_flight} is less than {path}.concurrency = {service.concurrency}: "
            "some handlers would never have anything to do",
        )
    drain, request = service.drain_timeout_seconds, settings.kafka.request_timeout_seconds
    rebalance = settings.kafka.rebalance_timeout_seconds
    if drain < rebalance <= drain + request:
        yield SettingsMistake(
            f"{path}.drain_timeout_seconds",
            f"= {_plain(drain)} with kafka.request_timeout_seconds = {_plain(request)} for the commit behind it is not "
            f"below {_REBALANCE} = {_plain(rebalance)}: a slow commit would come too late; lower one of them",
        )


def _warned_of_policies(
    path: str, in_progress: OnInProgress | None, store_error: OnStoreError | None
) -> Iterator[SettingsMistake]:
    if in_progress is OnInProgress.SKIP:
        yield SettingsMistake(
            f"{path}.on_in_progress",
            '= "skip" acknowledges events that are being handled: one whose owner dies is lost',
        )
    if store_error is OnStoreError.OPEN:
        yield SettingsMistake(
            f"{path}.on_store_error",
            '= "open" runs handlers unguarded while the store is down: an event that comes again then runs again',
        )


def _is_among(name: str, services: list[str]) -> bool:
    return same_name(name) in {same_name(service) for service in services}


def _unknown_service(name: str, services: list[str]) -> SettingsMistake:
    near = get_close_matches(name, services, n=1)
    hint = f"did you mean services.{near[0]}?" if near else f"known are {', '.join(services)}"
    return SettingsMistake(f"services.{name}", f"is no service of this application: nothing reads it; {hint}")


def misspelled_services(sections: object, services: list[str], origins: Mapping[Path, str]) -> list[SettingsMistake]:
    """Sections named nearly as a service of the application, which would run without them.

    Others may be those of another application that shares the file, and so may one beside which the
    service has a section of its own.  `origins`: which variable gave a value.
    """
    names = list(sections) if isinstance(sections, Mapping) else []
    free = [service for service in services if not _is_among(service, names)]
    found = [(name, service) for name in names for service in free if is_misspelled(name, service)]
    return [
        SettingsMistake(
            f"services.{name}",
            f"is no service of this application; did you mean services.{service}?{_set_by(name, origins)}",
        )
        for name, service in dict(reversed(found)).items()
    ]


def is_misspelled(name: str, service: str) -> bool:
    """Whether `name` looks like `service` with a slip in it, and not like a sister: billing-eu, worker-2."""
    given, wanted = same_name(name).split("_"), same_name(service).split("_")
    if "".join(given) == "".join(wanted):
        return True
    return len(given) == len(wanted) and all(map(_is_near, given, wanted))


def _is_near(given: str, wanted: str) -> bool:
    digits = [[letter for letter in word if letter.isdigit()] for word in (given, wanted)]
    return digits[0] == digits[1] and SequenceMatcher(None, given, wanted).ratio() >= _NEAR


def _set_by(name: str, origins: Mapping[Path, str]) -> str:
    variable = next((origin for path, origin in origins.items() if path[:2] == ("services", name)), None)
    return f" (set by {variable})" if variable else ""


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
        f"= {_plain(value.number)} {verb} {part}{bound.path} = {_plain(bound.number)}: {why}; "
        f"{move} the first or {other} the second",
    )


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)
