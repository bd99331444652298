"""Redis clients for the store, with limits on time, connections and retries."""

from __future__ import annotations

from typing import Any, Final

from pydantic import SecretStr
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from integr8s_idem.config import RedisClusterStoreSettings, RedisSentinelStoreSettings, RedisStoreSettings
from integr8s_idem.stores.redis.cluster import RedisClusterClient
from integr8s_idem.stores.redis.pools import QuickPool
from integr8s_idem.stores.redis.round_trips import Address
from integr8s_idem.stores.redis.sentinels import PrimaryPool, Sentinels
from integr8s_idem.stores.redis.topology import Topology

CLIENT_NAME: Final = "integr8s-idem"
"""Name of the connections in CLIENT LIST."""

RETRIES: Final = 2
"""Retries of a call after a lost connection; every call of the store can be repeated."""

_SHARE: Final = 4
"""A server that is only asked for the topology may take this fraction of the timeout, one in four."""

_AnyRedis = RedisStoreSettings | RedisClusterStoreSettings | RedisSentinelStoreSettings


def redis_client(settings: RedisStoreSettings) -> Redis:
    """Create a client that returns bytes; it connects on first use.  Close it with `aclose()`.

    A call waits for a free connection, connects, and is retried after a lost connection, all
    within the deadline of the repository that uses it.  There is no other limit on the wait
    for an answer: if you send commands of your own, set a deadline of your own.
    """
    return _client({**parse_url(settings.url), **_options(settings)})


def redis_cluster_client(settings: RedisClusterStoreSettings) -> RedisClusterClient:
    """Create a client for `RedisClusterIdempotencyRepository`; it connects on first use.  Close it with `aclose()`.

    It learns the servers from the first one that answers.  The options of the first URL apply to all of them.
    """
    seeds = [parse_url(url) for url in settings.urls]
    # The cluster client retries failed calls itself, on the server that has the keys by then.
    options = {**seeds[0], **_options(settings), "retry": Retry(NoBackoff(), 0)}
    options.pop("db", None)

    def make(address: Address) -> Redis:
        host, port = address
        return _client({**options, "host": host, "port": port})

    addresses = [(seed.get("host", "localhost"), seed.get("port", 6379)) for seed in seeds]
    return RedisClusterClient(Topology(addresses, make, settings.timeout_seconds / _SHARE))


def redis_sentinel_client(settings: RedisSentinelStoreSettings) -> Redis:
    """Create a client of the primary that Sentinels report; it connects on first use.  Close it with `aclose()`.

    Each new connection asks the Sentinels for the primary: after a failover, or after an answer from a server
    that has become a replica, the next call finds the new primary.  Everything else is as in `redis_client`.
    """
    sentinel_options = {
        **_tls(settings, used=settings.tls),
        **_credentials(settings.sentinel_username, settings.sentinel_password),
        "ssl": settings.tls,
        "socket_timeout": settings.timeout_seconds / _SHARE,
        "socket_connect_timeout": settings.timeout_seconds / _SHARE,
        # The next Sentinel is asked instead; by default the driver would retry this one ten times.
        "retry": Retry(NoBackoff(), 0),
    }
    addresses = [_host_and_port(address) for address in settings.sentinels]
    sentinel = Sentinels(addresses, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
    options = {**_options(settings), "db": settings.database}
    options["connection_class"] = SentinelManagedSSLConnection if settings.tls else SentinelManagedConnection
    return Redis.from_pool(PrimaryPool(settings.master_name, sentinel, **options))  # type: ignore[no-untyped-call]


def _client(options: dict[str, Any]) -> Redis:
    return Redis.from_pool(QuickPool(**options))


def _options(settings: _AnyRedis) -> dict[str, Any]:
    """Return the options of a pool.  Settings take precedence over the URL."""
    return {
        "max_connections": settings.max_connections,
        "timeout": settings.timeout_seconds,
        # With a timeout, the driver would start a task for each write.
        "socket_timeout": None,
        "socket_connect_timeout": _connect_seconds(settings),
        "retry": Retry(ExponentialWithJitterBackoff(base=0.02, cap=settings.timeout_seconds / 8), RETRIES),
        "client_name": CLIENT_NAME,
        "decode_responses": False,
        **_transport(settings),
        **_credentials(settings.username, settings.password),
    }


def _connect_seconds(settings: _AnyRedis) -> float:
    """Return the connect timeout: short if another server can be tried, so that time is left for it."""
    is_single = isinstance(settings, RedisStoreSettings)
    return settings.timeout_seconds if is_single else settings.timeout_seconds / _SHARE


def _credentials(username: str | None, password: SecretStr | None) -> dict[str, str]:
    credentials: dict[str, str] = {}
    if username is not None:
        credentials["username"] = username
    if password is not None:
        credentials["password"] = password.get_secret_value()
    return credentials


def _transport(settings: _AnyRedis) -> dict[str, Any]:
    match settings:
        case RedisStoreSettings(url=url) if url.startswith("unix://"):
            return {}
        case RedisStoreSettings(url=url):
            used = url.startswith("rediss://")
        case RedisClusterStoreSettings(urls=urls):
            used = urls[0].startswith("rediss://")
        case RedisSentinelStoreSettings():
            used = settings.tls
    return {"socket_keepalive": True, **_tls(settings, used=used)}


def _tls(settings: _AnyRedis, *, used: bool) -> dict[str, str]:
    files = {
        "ssl_ca_certs": settings.tls_ca_file,
        "ssl_certfile": settings.tls_cert_file,
        "ssl_keyfile": settings.tls_key_file,
    }
    return {name: path for name, path in files.items() if used and path is not None}


def _host_and_port(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
