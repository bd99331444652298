"""A Redis client that fits the store: bounded in time, connections and retries."""

from __future__ import annotations

from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

from integr8s_idem.config import RedisStoreSettings

CLIENT_NAME: Final = "integr8s-idem"
"""What CLIENT LIST shows for our connections."""

RETRIES: Final = 2
"""Times a call is sent again after a lost connection; every call of the store can be repeated."""


def redis_client(settings: RedisStoreSettings) -> Redis:
    """A client of its own, with bytes for answers; opens nothing yet.  Close it with `aclose()`.

    A call waits for a free connection, connects, and is repeated after a lost connection, all
    within the deadline of the repository that uses it.  There is no other limit to the wait
    for an answer: whoever sends commands of their own needs a deadline of their own.
    """
    pool = BlockingConnectionPool.from_url(
        settings.url,
        max_connections=settings.max_connections,
        timeout=settings.timeout_seconds,
        # The driver would start a task for each write to watch this time.
        socket_timeout=None,
        socket_connect_timeout=settings.timeout_seconds,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=settings.timeout_seconds / 8), RETRIES),
        client_name=CLIENT_NAME,
        decode_responses=False,
        **_transport(settings),
    )
    # What the settings say wins over what the URL says.
    pool.connection_kwargs.update(_credentials(settings))
    return Redis.from_pool(pool)


def _credentials(settings: RedisStoreSettings) -> dict[str, str]:
    credentials: dict[str, str] = {}
    if settings.username is not None:
        credentials["username"] = settings.username
    if settings.password is not None:
        credentials["password"] = settings.password.get_secret_value()
    return credentials


def _transport(settings: RedisStoreSettings) -> dict[str, Any]:
    if settings.url.startswith("unix://"):
        return {}
    transport: dict[str, Any] = {"socket_keepalive": True}
    if settings.url.startswith("rediss://"):
        files = {
            "ssl_ca_certs": settings.tls_ca_file,
            "ssl_certfile": settings.tls_cert_file,
            "ssl_keyfile": settings.tls_key_file,
        }
        transport.update({name: path for name, path in files.items() if path is not None})
    return transport
