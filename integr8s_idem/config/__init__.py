"""Settings: the sections, the model that reads them, the checks across them."""

from integr8s_idem.config.checks import check_settings, settings_warnings
from integr8s_idem.config.idempotency import (
    IdempotencyConfig,
    OnFailure,
    OnInProgress,
    OnKeyReused,
    OnStoreError,
    Section,
    chosen,
)
from integr8s_idem.config.loading import load_settings
from integr8s_idem.config.sections import (
    DynamodbStoreSettings,
    KafkaSettings,
    MemoryStoreSettings,
    MysqlStoreSettings,
    PostgresqlStoreSettings,
    RedisClusterStoreSettings,
    RedisSentinelStoreSettings,
    RedisStoreSettings,
    ReplaySettings,
    ServiceSettings,
    SqliteStoreSettings,
    StoreSettings,
    TelemetrySettings,
)
from integr8s_idem.config.settings import Settings

__all__ = [
    "DynamodbStoreSettings",
    "IdempotencyConfig",
    "KafkaSettings",
    "MemoryStoreSettings",
    "MysqlStoreSettings",
    "OnFailure",
    "OnInProgress",
    "OnKeyReused",
    "OnStoreError",
    "PostgresqlStoreSettings",
    "RedisClusterStoreSettings",
    "RedisSentinelStoreSettings",
    "RedisStoreSettings",
    "ReplaySettings",
    "Section",
    "ServiceSettings",
    "Settings",
    "SqliteStoreSettings",
    "StoreSettings",
    "TelemetrySettings",
    "check_settings",
    "chosen",
    "load_settings",
    "settings_warnings",
]
