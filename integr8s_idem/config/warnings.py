"""Warnings about settings that are valid and still likely to be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from typing import TYPE_CHECKING, Final

from integr8s_idem.config.checks import REBALANCE, plain, urls_of
from integr8s_idem.config.environment import same_name
from integr8s_idem.config.idempotency import OnInProgress, OnStoreError
from integr8s_idem.config.schema_shape import Path
from integr8s_idem.config.sections import ServiceSettings
from integr8s_idem.config.store_sections import (
    MOST_RESULT_BYTES,
    DynamodbStoreSettings,
    MemoryStoreSettings,
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisClusterStoreSettings,
    RedisSentinelStoreSettings,
    RedisStoreSettings,
    SqliteStoreSettings,
    StoreSettings,
)
from integr8s_idem.errors import SettingsMistake

if TYPE_CHECKING:
    from integr8s_idem.config.settings import Settings

KAFKA_RETENTION_SECONDS: Final = 7 * 24 * 3600
"""Default retention of topics (retention.ms)."""

_SESSION_BOUNDS: Final = (6.0, 1800.0)
"""Default limits of brokers for the session timeout (group.min/max.session.timeout.ms)."""

_MISSPELLING_RATIO: Final = 0.8
"""Minimum similarity of a misspelled word: one wrong character in five."""


def settings_warnings(settings: Settings, services: Iterable[str] = ()) -> list[SettingsMistake]:
    """Return warnings about valid but risky settings, in a stable order, with those of services last.

    Args:
        services: Names of the application's services, if known.
    """
    names = list(services)
    return [
        *_global_warnings(settings),
        *(warning for name, own in settings.services.items() for warning in _service_warnings(settings, name, own)),
        *(_unknown_service(name, names) for name in settings.services if names and not _is_among(name, names)),
    ]


def _global_warnings(settings: Settings) -> Iterator[SettingsMistake]:
    idempotency, kafka = settings.idempotency, settings.kafka
    ttl = idempotency.default_ttl_seconds
    if ttl < KAFKA_RETENTION_SECONDS:
        yield SettingsMistake(
            "idempotency.default_ttl_seconds",
            f"= {plain(ttl)} is less than the {KAFKA_RETENTION_SECONDS} (7 days) of the default retention of topics: "
            "a replay of older events runs them again; raise it, or lower retention.ms of the topics",
        )
    if isinstance(settings.store, MemoryStoreSettings):
        yield SettingsMistake(
            "store.kind",
            '= "memory" is local to one process: records are lost on exit and hidden from other processes',
        )
    yield from _policy_warnings("idempotency", idempotency.on_in_progress, idempotency.on_store_error)
    least, most = _SESSION_BOUNDS
    if not least <= kafka.session_timeout_seconds <= most:
        yield SettingsMistake(
            "kafka.session_timeout_seconds",
            f"= {plain(kafka.session_timeout_seconds)} is outside the {plain(least)} to {plain(most)} seconds "
            "that brokers allow by default: workers cannot join their groups",
        )
    if kafka.auto_offset_reset == "latest":
        yield SettingsMistake(
            "kafka.auto_offset_reset",
            '= "latest" starts new groups at the end of their topics: earlier events are skipped',
        )
    if kafka.sasl_password is not None and not kafka.security_protocol.startswith("SASL"):
        yield SettingsMistake(
            "kafka.sasl_password",
            f'is ignored with security_protocol = "{kafka.security_protocol}": connections are not authenticated; '
            "use SASL_SSL?",
        )
    if settings.replay.unsigned == "trust":
        yield SettingsMistake(
            "replay.unsigned",
            '= "trust" lets every producer rerun completed work, and hide events from handlers and groups, with a '
            "header; set replay.secret instead",
        )
    yield from _store_warnings(settings.store)
    yield from _result_warnings(settings)


def _result_warnings(settings: Settings) -> Iterator[SettingsMistake]:
    own = settings.idempotency
    # The default exceeds the limit, too; warn only if the user has set a value.
    is_set = own.enable_result_caching and "max_result_size_bytes" in own.model_fields_set
    if isinstance(settings.store, DynamodbStoreSettings) and is_set and own.max_result_size_bytes > MOST_RESULT_BYTES:
        yield SettingsMistake(
            "idempotency.max_result_size_bytes",
            f"= {own.max_result_size_bytes} is more than the {MOST_RESULT_BYTES} bytes that an item of DynamoDB "
            "can hold for a result and its media type: larger results are dropped and not returned to duplicates; "
            "lower it, return a reference, or use another kind of store",
        )


def _store_warnings(store: StoreSettings) -> Iterator[SettingsMistake]:
    if isinstance(store, RedisSentinelStoreSettings | PostgresqlStoreSettings | MysqlStoreSettings) and not store.tls:
        for name in ("tls_ca_file", "tls_cert_file"):
            if getattr(store, name) is not None:
                yield SettingsMistake(
                    f"store.{name}",
                    "is ignored without store.tls = true: connections to the store are not encrypted; "
                    "set store.tls, or remove this setting",
                )
    match store:
        case SqliteStoreSettings() | PostgresqlStoreSettings() | MysqlStoreSettings():
            if store.lock_timeout_seconds >= store.timeout_seconds:
                yield SettingsMistake(
                    "store.lock_timeout_seconds",
                    f"= {plain(store.lock_timeout_seconds)} is not below store.timeout_seconds = "
                    f"{plain(store.timeout_seconds)}: a record locked by another process looks like an unavailable "
                    "store; lower the first or raise the second",
                )
        case RedisStoreSettings(tls_ca_file=str()) | RedisClusterStoreSettings(tls_ca_file=str()):
            for path, url in urls_of(store):
                if not url.startswith("rediss://"):
                    yield SettingsMistake(
                        "store.tls_ca_file",
                        f"is ignored, since {path} does not start with rediss://: connections to the store are not "
                        "encrypted",
                    )
                    break


def _service_warnings(settings: Settings, name: str, service: ServiceSettings) -> Iterator[SettingsMistake]:
    path = f"services.{name}"
    if service.mode == "observe":
        yield from _observe_warnings(path, service)
    yield from _policy_warnings(path, service.on_in_progress, service.on_store_error)
    if service.max_in_flight < service.concurrency:
        yield SettingsMistake(
            f"{path}.max_in_flight",
            f"= {service.max_in_flight} is less than {path}.concurrency = {service.concurrency}: "
            "some of the concurrent handlers would stay idle",
        )
    drain, request = service.drain_timeout_seconds, settings.kafka.request_timeout_seconds
    rebalance = settings.kafka.rebalance_timeout_seconds
    if drain < rebalance <= drain + request:
        yield SettingsMistake(
            f"{path}.drain_timeout_seconds",
            f"= {plain(drain)} plus kafka.request_timeout_seconds = {plain(request)} for the final commit is not "
            f"below {REBALANCE} = {plain(rebalance)}: a slow commit would be too late; lower one of them",
        )


def _observe_warnings(path: str, service: ServiceSettings) -> Iterator[SettingsMistake]:
    yield SettingsMistake(
        f"{path}.mode",
        '= "observe" guards nothing: duplicates are handled, and only counted; '
        'set mode = "enforce" when you have seen the report of integr8s-idem observe',
    )
    for name in ("on_in_progress", "on_failure", "on_store_error"):
        if getattr(service, name) is not None:
            yield SettingsMistake(
                f"{path}.{name}", f'does not apply with {path}.mode = "observe": handlers run as without a guard'
            )


def _policy_warnings(
    path: str, in_progress: OnInProgress | None, store_error: OnStoreError | None
) -> Iterator[SettingsMistake]:
    if in_progress is OnInProgress.SKIP:
        yield SettingsMistake(
            f"{path}.on_in_progress",
            '= "skip" acknowledges events that are still being handled: if their owner dies, they are lost',
        )
    if store_error is OnStoreError.OPEN:
        yield SettingsMistake(
            f"{path}.on_store_error",
            '= "open" runs handlers unguarded while the store is unavailable: redelivered events run again',
        )


def _is_among(name: str, services: list[str]) -> bool:
    return same_name(name) in {same_name(service) for service in services}


def _unknown_service(name: str, services: list[str]) -> SettingsMistake:
    near = get_close_matches(name, services, n=1)
    hint = f"did you mean services.{near[0]}?" if near else f"known services: {', '.join(services)}"
    return SettingsMistake(f"services.{name}", f"is not a service of this application: it is ignored; {hint}")


def misspelled_services(sections: object, services: list[str], origins: Mapping[Path, str]) -> list[SettingsMistake]:
    """Return mistakes for sections with a misspelled name of a service.

    Other unknown sections may belong to another application that shares the file, as may a similar name if
    the service has its own section.  `origins` maps paths to the variables that set them.
    """
    names = list(sections) if isinstance(sections, Mapping) else []
    missing = [service for service in services if not _is_among(service, names)]
    found = [(name, service) for name in names for service in missing if is_misspelled(name, service)]
    return [
        SettingsMistake(
            f"services.{name}",
            f"is not a service of this application; did you mean services.{service}?{_set_by(name, origins)}",
        )
        for name, service in dict(reversed(found)).items()
    ]


def is_misspelled(name: str, service: str) -> bool:
    """Return whether `name` is a misspelling of `service`, and not a related name like billing-eu or worker-2."""
    given, wanted = same_name(name).split("_"), same_name(service).split("_")
    if "".join(given) == "".join(wanted):
        return True
    return len(given) == len(wanted) and all(map(_is_near, given, wanted))


def _is_near(given: str, wanted: str) -> bool:
    digits = [[char for char in word if char.isdigit()] for word in (given, wanted)]
    return digits[0] == digits[1] and SequenceMatcher(None, given, wanted).ratio() >= _MISSPELLING_RATIO


def _set_by(name: str, origins: Mapping[Path, str]) -> str:
    variable = next((origin for path, origin in origins.items() if path[:2] == ("services", name)), None)
    return f" (set by {variable})" if variable else ""
