"""Replace the servers of settings by embedded servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from integr8s_idem.config import RedisStoreSettings, Settings, SqliteStoreSettings, StoreSettings

NO_KAFKA_CREDENTIALS: Final[Mapping[str, Mapping[str, Any]]] = {
    "kafka": {
        "security_protocol": "PLAINTEXT",
        "sasl_username": None,
        "sasl_password": None,
        "ssl_ca_file": None,
    },
}
"""Credentials of real brokers do not apply to embedded ones."""

_NO_STATIC_MEMBERSHIP: Final[Mapping[str, Any]] = {"group_instance_id": None}
"""The emulator does not implement it."""

_NO_STORE_CREDENTIALS: Final[Mapping[str, Any]] = {
    "username": None,
    "password": None,
    "tls_ca_file": None,
    "wait_replicas": 0,
    "tls_cert_file": None,
    "tls_key_file": None,
}


def keeps_its_store(own: Settings) -> bool:
    """Return whether the configured store needs no server: a SQLite file."""
    return isinstance(own.store, SqliteStoreSettings)


def embedded_settings(own: Settings, servers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the sections that replace those of the settings.

    Args:
        own: The user's settings.
        servers: Settings of the embedded servers.
    """
    # The default port may be used by another worker of this machine.
    is_set = "metrics_port" in own.telemetry.model_fields_set
    kafka = {**NO_KAFKA_CREDENTIALS["kafka"], **_NO_STATIC_MEMBERSHIP}
    below = {"kafka": kafka, **({} if is_set else {"telemetry": {"metrics_port": 0}})}
    # The section is replaced as a whole, since settings of another kind of store do not apply.
    return {**merged(below, servers), "store": _store(own.store, servers.get("store"))}


def _store(own: StoreSettings, embedded: Mapping[str, Any] | None) -> StoreSettings:
    if embedded is None:
        return own
    kept = own.model_dump(exclude_unset=True) if isinstance(own, RedisStoreSettings) else {}
    return RedisStoreSettings.model_validate({**kept, **_NO_STORE_CREDENTIALS, **embedded})


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; values of `above` take precedence."""
    both = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            both[name] = merged(below[name], above[name])
    return both
