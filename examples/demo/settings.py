"""The settings of a run: addresses of the servers, and short timeouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, SecretStr

from examples.demo.errors import DemoError
from integr8s_idem.config import (
    KafkaSettings,
    PostgresqlStoreSettings,
    RedisStoreSettings,
    SqliteStoreSettings,
    StoreSettings,
    load_settings,
)
from providers import platform
from providers.settings import PlatformSettings

LEASE_SECONDS: Final = 7.0
"""Lease after which the executions of the killed worker are taken over."""

DemoStore: TypeAlias = RedisStoreSettings | SqliteStoreSettings | PostgresqlStoreSettings

STORES: Final = ("redis", "sqlite", "postgresql")

DATABASE: Final = "platform.db"
"""The platform's SQLite file in the folder of the run."""

_SERVICE: Final[Mapping[str, Any]] = {
    "ordering": "key",  # slow scripts do not block others
    "retry_initial_seconds": 0.1,
    "retry_max_seconds": 1.0,
    "commit_interval_seconds": 0.5,
    "drain_timeout_seconds": 10.0,
}


def servers_named_in(file: Path) -> tuple[KafkaSettings, RedisStoreSettings]:
    """Read the addresses of Kafka and Redis from a settings file and the environment, which takes precedence.

    Raises:
        SettingsError: The file is not valid.
        DemoError: The file does not name a Redis.
    """
    settings = load_settings(file, PlatformSettings)
    if not isinstance(settings.store, RedisStoreSettings):
        raise DemoError(
            f"{file}: store.kind is {settings.store.kind}; with your own servers, the demo requires Redis. "
            "For an embedded store, use --store"
        )
    return settings.kafka, settings.store


def of_the_run(run: str, kafka: KafkaSettings, store: DemoStore) -> tuple[KafkaSettings, DemoStore]:
    """Return settings for the same servers, with topics that are unique to this run."""
    times = {"session_timeout_seconds": 6.0, "heartbeat_interval_seconds": 1.0, "metadata_max_age_seconds": 5.0}
    kafka = kafka.model_copy(update={**times, "topic_prefix": f"{kafka.topic_prefix}{run}."})
    return kafka, store.model_copy(update={"timeout_seconds": min(store.timeout_seconds, LEASE_SECONDS / 4)})


def write_settings(file: Path, run: str, kafka: KafkaSettings, store: StoreSettings, database_url: str) -> None:
    """Write the settings file of the services. Consumer groups and keys are unique to this run."""
    folder = file.parent
    tables = {
        "kafka": _plain(kafka),
        "store": _plain(store),
        "idempotency": {"key_prefix": run, "processing_timeout_seconds": LEASE_SECONDS},
        "telemetry": {"metrics_port": 0},
        "services": {name: {**_SERVICE, "group_id": f"{run}.{name}"} for name in platform.services},
        "platform": {
            # The demo runs only its own scripts.
            "runner": "subprocess",
            "scripts_as_root": True,
            "database_url": database_url,
            "work_folder": str(folder / "work"),
            "sweep_interval_seconds": 2.0,
        },
    }
    file.touch(mode=0o600)
    file.write_text(_toml(tables), encoding="utf-8")


def _plain(section: BaseModel) -> dict[str, Any]:
    """Dump a section with plaintext passwords: only the services read the file, and it is removed."""
    values = {name: getattr(section, name) for name in type(section).model_fields}
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in values.items()
        if value is not None
    }


def _toml(table: Mapping[str, Any], above: str = "") -> str:
    """Format `table` as TOML; strings, numbers and booleans have the same format as in JSON."""
    own = [f"{name} = {_value(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    text = "".join(f"{line}\n" for line in ([f"[{above}]"] if above and own else []) + own)
    for name, value in table.items():
        if isinstance(value, Mapping):
            text += _toml(value, f"{above}.{name}" if above else name)
    return text


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
