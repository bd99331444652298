"""What embedded servers take the place of, in settings that name others."""

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
"""What the settings say about real brokers means nothing to embedded ones."""

_NO_STORE_CREDENTIALS: Final[Mapping[str, Any]] = {
    "username": None,
    "password": None,
    "tls_ca_file": None,
    "wait_replicas": 0,
    "tls_cert_file": None,
    "tls_key_file": None,
}


def keeps_its_store(own: Settings) -> bool:
    """Whether the store that people set needs no server: a SQLite file."""
    return isinstance(own.store, SqliteStoreSettings)


def embedded_settings(own: Settings, servers: Mapping[str, Any]) -> Mapping[str, Any]:
    """What to lay over the settings.  `own`: what people set; `servers`: what leads to the embedded ones."""
    # Somebody who tries things out may do so beside a worker that has the usual port.
    is_set = "metrics_port" in own.telemetry.model_fields_set
    below = {**NO_KAFKA_CREDENTIALS, **({} if is_set else {"telemetry": {"metrics_port": 0}})}
    # A section as a whole: the settings of another kind of store would not go with it.
    return {**merged(below, servers), "store": _store(own.store, servers.get("store"))}


def _store(own: StoreSettings, embedded: Mapping[str, Any] | None) -> StoreSettings:
    if embedded is None:
        return own
    told = own.model_dump(exclude_unset=True) if isinstance(own, RedisStoreSettings) else {}
    return RedisStoreSettings.model_validate({**told, **_NO_STORE_CREDENTIALS, **embedded})


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, table by table; `above` wins."""
    both = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            both[name] = merged(below[name], above[name])
    return both
