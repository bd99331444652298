"""Settings: the sections, the model that reads them, the checks across them."""

from integr8s_idem.config.policies import (
    IdempotencyConfig,
    OnFailure,
    OnInProgress,
    OnKeyReused,
    OnStoreError,
    Section,
)
from integr8s_idem.config.sections import (
    KafkaSettings,
    MemoryStoreSettings,
    RedisStoreSettings,
    ServiceSettings,
    StoreSettings,
    TelemetrySettings,
)

__all__ = [
    "IdempotencyConfig",
    "KafkaSettings",
    "MemoryStoreSettings",
    "OnFailure",
    "OnInProgress",
    "OnKeyReused",
    "OnStoreError",
    "RedisStoreSettings",
    "Section",
    "ServiceSettings",
    "StoreSettings",
    "TelemetrySettings",
]
