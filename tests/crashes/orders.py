"""Instructions for a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from integr8s_idem import IdempotencyConfig
from integr8s_idem.config import KafkaSettings, ServiceSettings

SERVICE: Final = "jobs"
MOST_ATTEMPTS: Final = 50
"""More than the crashes of any trial: no job is given up because its processes were killed."""


@dataclass(frozen=True)
class Order:
    """Instructions for a worker; sent as JSON."""

    bootstrap: str
    store: dict[str, Any]
    """Settings of the store, as under `[store]`; for transactional workers, only the SQLAlchemy URL as `url`."""
    prefix: str
    """Prefix of topics, group and keys."""
    folder: str
    """Folder for effects and logs."""
    transactional: bool = False
    """Whether handlers write into the database of the store, and commit their outcome with their effect."""
    isolation: str = ""
    """Isolation level of transactional handlers; empty for that of the engine."""
    reconciles: bool = False
    """Whether the handler has a reconcile function."""
    stepping: bool = False
    """Whether the handler uses steps."""
    step: str = ""
    """Step and moment at which the worker dies, such as `charge:after_reserve`; empty for none."""
    bug: str = ""
    """Bug to inject, from `transactional_bugs` or `retry_bugs`; empty for none."""
    point: str = ""
    """Crash point at which the worker dies; empty for none."""
    occurrence: int = 1
    """Dies at this occurrence of `point`."""
    stalls: bool = False
    """Whether to stop at the point until SIGCONT instead of dying, after creating the file `stalled` in the folder."""
    ordering: Literal["partition", "key", "none"] = "partition"
    lease: float = 1.5
    session: float = 1.5
    request_timeout: float = 5.0
    """Timeout of requests to the broker."""
    max_attempts: int = MOST_ATTEMPTS
    samples: str = ""
    """File for samples of the worker's resource usage; empty for none."""

    @property
    def key_prefix(self) -> str:
        """Key prefix of the worker's records."""
        return self.prefix.rstrip(".")

    @property
    def group(self) -> str:
        return self.prefix + SERVICE

    @property
    def kafka(self) -> KafkaSettings:
        return KafkaSettings(
            bootstrap_servers=self.bootstrap,
            topic_prefix=self.prefix,
            session_timeout_seconds=self.session,
            heartbeat_interval_seconds=self.session / 5,
            rebalance_timeout_seconds=10,
            request_timeout_seconds=self.request_timeout,
            metadata_max_age_seconds=5,
        )

    @property
    def service(self) -> ServiceSettings:
        return ServiceSettings(
            ordering=self.ordering,
            retry_initial_seconds=0.05,
            retry_max_seconds=0.2,
            commit_interval_seconds=0.1,
            drain_timeout_seconds=5,
        )

    @property
    def idempotency(self) -> IdempotencyConfig:
        return IdempotencyConfig(
            key_prefix=self.key_prefix, processing_timeout_seconds=self.lease, max_attempts=self.max_attempts
        )
