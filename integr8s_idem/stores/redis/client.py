"""Redis clients that fit the store: bounded in time, connections and retries."""

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
"""What CLIENT LIST shows for our connections."""

RETRIES: Final = 2
"""Times a call is sent again after a lost connection; every call of the store can be repeated."""

_SHARE: Final = 4
"""A server that is only asked the way, and does not answer, costs this part of a call's time."""

_AnyRedis = RedisStoreSettings | RedisClusterStoreSettings | RedisSentinelStoreSettings


def redis_client(settings: RedisStoreSettings) -> Redis:
    """A client of its own, with bytes for answers; opens nothing yet.  Close it with `aclose()`.

    A call waits for a free connection, connects, and is repeated after a lost connection, all
    within the deadline of the repository that uses it.  There is no other limit to the wait
    for an answer: whoever sends commands of their own needs a deadline of their own.
    """
    return _client({**parse_url(settings.url), **_options(settings)})


def redis_cluster_client(settings: RedisClusterStoreSettings) -> RedisClusterClient:
    """A client for `RedisClusterIdempotencyRepository`; opens nothing yet.  Close it with `aclose()`.

    It learns the servers from the first that answers.  The options of the first URL count for all of them.
    """
    seeds = [parse_url(url) for url in settings.urls]
    # What fails is sent again by the cluster's client, to whoever has the keys by then.
    options = {**seeds[0], **_options(settings), "retry": Retry(NoBackoff(), 0)}
    options.pop("db", None)

    def make(address: Address) -> Redis:
        host, port = address
        return _client({**options, "host": host, "port": port})

    addresses = [(seed.get("host", "localhost"), seed.get("port", 6379)) for seed in seeds]
    return RedisClusterClient(Topology(addresses, make, settings.timeout_seconds / _SHARE))


def redis_sentinel_client(settings: RedisSentinelStoreSettings) -> Redis:
    """A client of the primary that Sentinels name; opens nothing yet.  Close it with `aclose()`.

    As `redis_client`.  Each new connection asks for the primary: after a failover, or an answer that the
    server is a replica by now, the next call finds the new one.
    """
    asking = {
        **_tls(settings, used=settings.tls),
        **_credentials(settings.sentinel_username, settings.sentinel_password),
        "ssl": settings.tls,
        "socket_timeout": settings.timeout_seconds / _SHARE,
        "socket_connect_timeout": settings.timeout_seconds / _SHARE,
        # The next Sentinel is asked instead; the driver would ask this one ten times more.
        "retry": Retry(NoBackoff(), 0),
    }
    addresses = [_parted(address) for address in settings.sentinels]
    sentinel = Sentinels(addresses, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    options = {**_options(settings), "db": settings.database}
    options["connection_class"] = SentinelManagedSSLConnection if settings.tls else SentinelManagedConnection
    return Redis.from_pool(PrimaryPool(settings.master_name, sentinel, **options))  # type: ignore[no-untyped-call]


def _client(options: dict[str, Any]) -> Redis:
    return Redis.from_pool(QuickPool(**options))


def _options(settings: _AnyRedis) -> dict[str, Any]:
    """Of a pool.  What the settings say wins over what a URL says."""
    return {
        "max_connections": settings.max_connections,
        "timeout": settings.timeout_seconds,
        # The driver would start a task for each write to watch this time.
        "socket_timeout": None,
        "socket_connect_timeout": _connect_seconds(settings),
        "retry": Retry(ExponentialWithJitterBackoff(base=0.02, cap=settings.timeout_seconds / 8), RETRIES),
        "client_name": CLIENT_NAME,
        "decode_responses": False,
        **_transport(settings),
        **_credentials(settings.username, settings.password),
    }


def _connect_seconds(settings: _AnyRedis) -> float:
    """Where there is another server to turn to, one that takes no connection must leave time for it."""
    alone = isinstance(settings, RedisStoreSettings)
    return settings.timeout_seconds if alone else settings.timeout_seconds / _SHARE


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


def _parted(address: str) -> Address:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
