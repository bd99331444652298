"""Settings: the sections, the model that reads them, the checks across them."""

from integr8s_idem.config.checks import check_settings
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
from integr8s_idem.config.sections import KafkaSettings, ReplaySettings, ServiceSettings, TelemetrySettings
from integr8s_idem.config.settings import Settings
from integr8s_idem.config.store_sections import (
    WITHOUT_SECRET,
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
from integr8s_idem.config.warnings import settings_warnings

__all__ = [
    "WITHOUT_SECRET",
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
