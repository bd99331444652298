"""What a worker process is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from integr8s_idem import IdempotencyConfig
from integr8s_idem.config import KafkaSettings, ServiceSettings

SERVICE: Final = "boss"
MOST_ATTEMPTS: Final = 50
"""More than any trial has lives: no job is given up because processes were killed."""


@dataclass(frozen=True)
class Order:
    """What a worker is to do; travels as JSON."""

    bootstrap: str
    store: dict[str, Any]
    """Of the store, as under `[store]`; of transactional workers `url` as SQLAlchemy writes it, and no more."""
    prefix: str
    """Of its topics and its group, and its keys in the store."""
    folder: str
    """For effects and logs."""
    transactional: bool = False
    """Its handlers write into the database that the store is in; their outcome commits with that."""
    isolation: str = ""
    """Of a transactional handler's transaction; empty: what the engine has."""
    stepping: bool = False
    """Its handler works in steps."""
    step: str = ""
    """At which moment of which step it dies, as in `charge:after_reserve`; empty: at none."""
    bug: str = ""
    """A mistake of `tests.crashes.transactional_bugs` that it makes; empty: none."""
    point: str = ""
    """Where it dies; empty: nowhere."""
    occurrence: int = 1
    stalls: bool = False
    """It stops itself there instead, until somebody sends SIGCONT; the file `stalled` in its folder says so before."""
    ordering: Literal["partition", "key", "none"] = "partition"
    lease: float = 1.5
    session: float = 1.5
    request_timeout: float = 5.0
    """Of the broker."""
    max_attempts: int = MOST_ATTEMPTS
    samples: str = ""
    """File for what it weighs; empty: not weighed."""

    @property
    def key_prefix(self) -> str:
        """Of its records in the store."""
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
