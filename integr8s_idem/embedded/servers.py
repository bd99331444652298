"""Start the embedded Kafka and Redis together, for `run --embedded` and the demo."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any

from integr8s_idem.embedded.kafka_server import EmbeddedKafka
from integr8s_idem.embedded.redis_server import EmbeddedRedis

SESSION_TIMEOUT_SECONDS = 6.0
HEARTBEAT_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedServers:
    """Addresses of the embedded servers, for all processes of this machine."""

    bootstrap_servers: str
    redis_url: str | None
    """`None` if no Redis was requested."""
    replay_secret: str = field(default_factory=partial(token_hex, 32), repr=False)
    """Signs replays of dead letters while these servers run."""

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return settings that override the user's: addresses, a secret, and short timeouts."""
        return {
            "kafka": {
                "bootstrap_servers": self.bootstrap_servers,
                "security_protocol": "PLAINTEXT",
                "session_timeout_seconds": SESSION_TIMEOUT_SECONDS,
                "heartbeat_interval_seconds": HEARTBEAT_INTERVAL_SECONDS,
                # The emulator does not report the configuration of topics, and deletes them when it stops.
                "retention_check": "off",
            },
            "replay": {"secret": self.replay_secret},
            **({"store": {"kind": "redis", "url": self.redis_url}} if self.redis_url is not None else {}),
        }


@asynccontextmanager
async def embedded(*, redis: bool = True, durable: bool = False) -> AsyncIterator[EmbeddedServers]:
    """Start a Kafka emulator and a real Redis; stop both at the end.

    Args:
        redis: Whether to start a Redis.
        durable: Redis keeps an append-only file, so that it can be killed and restarted.

    Raises:
        ApplicationError: The extra `embedded` is not installed, or a server does not start.
    """
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(EmbeddedRedis(durable=durable)) if redis else None
        kafka = await stack.enter_async_context(EmbeddedKafka())
        yield EmbeddedServers(bootstrap_servers=kafka.bootstrap_servers, redis_url=store.url if store else None)
