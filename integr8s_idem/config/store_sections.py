"""The settings of each kind of store."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr

from integr8s_idem.config.idempotency import (
    NOT_BOOL,
    Count,
    Interval,
    Seconds,
    Section,
)
from integr8s_idem.config.urls import (
    cluster_url,
    dynamodb_url,
    mysql_url,
    one_or_many,
    postgresql_url,
    redis_url,
    sentinel_address,
    without_secret,
)

WITHOUT_SECRET: Final = PlainSerializer(without_secret, return_type=str, when_used="json-unless-none")
"""Serializes an address without its password, for settings that are logged or displayed as JSON."""


ClusterUrl: TypeAlias = Annotated[str, AfterValidator(cluster_url), WITHOUT_SECRET]


SentinelAddress: TypeAlias = Annotated[str, AfterValidator(sentinel_address)]


class RedisStoreSettings(Section):
    """Records in Redis (6.2 or newer) or Valkey."""

    kind: Literal["redis"] = "redis"
    """Kind of store: redis, redis-cluster, redis-sentinel, postgresql, sqlite, mysql, dynamodb, or memory for tests."""
    url: Annotated[str, AfterValidator(redis_url), WITHOUT_SECRET] = "redis://localhost:6379/0"
    """redis://host:port/db, rediss:// for TLS, unix:///path for a socket."""
    username: str | None = None
    """ACL user."""
    password: SecretStr | None = None
    """Password; preferably set in the environment."""
    timeout_seconds: Seconds = 2
    """Timeout of one call, after which it raises StoreUnavailableError."""
    max_connections: Count = 16
    """Maximum number of connections per service; batching needs few."""
    tls_ca_file: str | None = None
    """CA certificates to trust with rediss://; default: those of the system."""
    tls_cert_file: str | None = None
    """Client certificate, if the server requires one."""
    tls_key_file: str | None = None
    """Key of the client certificate."""
    wait_replicas: Annotated[int, Field(ge=0, le=100), NOT_BOOL] = 0
    """Replicas that must confirm each write, or the call fails. 0 does not wait for replicas."""
    wait_timeout_seconds: Seconds = 1
    """Timeout of the confirmation by replicas; less than timeout_seconds."""


class RedisClusterStoreSettings(Section):
    """Records in a Redis Cluster."""

    kind: Literal["redis-cluster"]
    """Kind of store."""
    urls: Annotated[tuple[ClusterUrl, ...], BeforeValidator(one_or_many), Field(min_length=1)] = (
        "redis://localhost:6379",
    )
    """Servers to connect to first, all with the same user and password: redis://host:port, rediss:// for TLS."""
    username: str | None = None
    """ACL user."""
    password: SecretStr | None = None
    """Password; preferably set in the environment."""
    timeout_seconds: Seconds = 2
    """Timeout of one call, including redirects, after which it raises StoreUnavailableError."""
    max_connections: Count = 16
    """Maximum number of connections per service and server; batching needs few."""
    tls_ca_file: str | None = None
    """CA certificates to trust with rediss://; default: those of the system."""
    tls_cert_file: str | None = None
    """Client certificate, if the server requires one."""
    tls_key_file: str | None = None
    """Key of the client certificate."""
    wait_replicas: Annotated[int, Field(ge=0, le=100), NOT_BOOL] = 0
    """Replicas that must confirm each write, or the call fails. 0 does not wait for replicas."""
    wait_timeout_seconds: Seconds = 1
    """Timeout of the confirmation by replicas; less than timeout_seconds."""


class RedisSentinelStoreSettings(Section):
    """Records in a Redis primary found through Sentinels."""

    kind: Literal["redis-sentinel"]
    """Kind of store."""
    sentinels: Annotated[tuple[SentinelAddress, ...], BeforeValidator(one_or_many), Field(min_length=1)] = (
        "localhost:26379",
    )
    """Addresses of Sentinels, as host:port; one that answers is enough."""
    master_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "mymaster"
    """Name of the primary in the configuration of the Sentinels."""
    database: Annotated[int, Field(ge=0), NOT_BOOL] = 0
    """Database number."""
    username: str | None = None
    """ACL user of the primary."""
    password: SecretStr | None = None
    """Password of the primary; preferably set in the environment."""
    sentinel_username: str | None = None
    """ACL user of the Sentinels."""
    sentinel_password: SecretStr | None = None
    """Password of the Sentinels, separate from that of the primary; preferably set in the environment."""
    timeout_seconds: Seconds = 2
    """Timeout of one call, including the search for the primary, after which it raises StoreUnavailableError."""
    max_connections: Count = 16
    """Maximum number of connections per service; batching needs few."""
    tls: bool = False
    """Use TLS for Sentinels and Redis."""
    tls_ca_file: str | None = None
    """CA certificates to trust with tls; default: those of the system."""
    tls_cert_file: str | None = None
    """Client certificate, if the server requires one."""
    tls_key_file: str | None = None
    """Key of the client certificate."""
    wait_replicas: Annotated[int, Field(ge=0, le=100), NOT_BOOL] = 0
    """Replicas that must confirm each write, or the call fails. 0 does not wait for replicas."""
    wait_timeout_seconds: Seconds = 1
    """Timeout of the confirmation by replicas; less than timeout_seconds."""


class PostgresqlStoreSettings(Section):
    """Records in PostgreSQL (15 or newer)."""

    kind: Literal["postgresql"]
    """Kind of store."""
    url: Annotated[str, AfterValidator(postgresql_url), WITHOUT_SECRET] = "postgresql://localhost:5432/postgres"
    """postgresql://host:port/database; `integr8s-idem store migrate` creates the tables."""
    username: str | None = None
    """Database user."""
    password: SecretStr | None = None
    """Password; preferably set in the environment."""
    timeout_seconds: Seconds = 5
    """Timeout of one call, including the connection, after which it raises StoreUnavailableError."""
    lock_timeout_seconds: Seconds = 2
    """Timeout for a record that is locked by another transaction."""
    max_connections: Count = 8
    """Maximum number of connections per service."""
    tls: bool = False
    """Use TLS; the certificate and host name of the server are verified."""
    tls_ca_file: str | None = None
    """CA certificates to trust with tls; default: those of the system."""
    tls_cert_file: str | None = None
    """Client certificate, if the server requires one."""
    tls_key_file: str | None = None
    """Key of the client certificate."""
    purge_interval_seconds: Interval = 60
    """Interval at which workers delete expired records; 0 disables this."""


class SqliteStoreSettings(Section):
    """Records in a SQLite file, for a single machine without a database server.  Tables are created at startup."""

    kind: Literal["sqlite"]
    """Kind of store."""
    path: str = "idempotency.db"
    """The file; not on a network disk."""
    timeout_seconds: Seconds = 5
    """Timeout of one call, after which it raises StoreUnavailableError."""
    lock_timeout_seconds: Seconds = 2
    """Timeout for a lock held by another process."""
    purge_interval_seconds: Interval = 60
    """Interval at which workers delete expired records; 0 disables this."""


class MysqlStoreSettings(Section):
    """Records in MySQL (8.0.19 or newer) or MariaDB (10.6 or newer)."""

    kind: Literal["mysql"]
    """Kind of store."""
    url: Annotated[str, AfterValidator(mysql_url), WITHOUT_SECRET] = "mysql://localhost:3306/idempotency"
    """mysql://host:port/database; `integr8s-idem store migrate` creates the tables."""
    username: str | None = None
    """Database user."""
    password: SecretStr | None = None
    """Password; preferably set in the environment."""
    timeout_seconds: Seconds = 5
    """Timeout of one call, including the connection, after which it raises StoreUnavailableError."""
    lock_timeout_seconds: Count = 2
    """Timeout for a record that is locked by another transaction, in whole seconds."""
    max_connections: Count = 8
    """Maximum number of connections per service."""
    tls: bool = False
    """Use TLS; the certificate and host name of the server are verified."""
    tls_ca_file: str | None = None
    """CA certificates to trust with tls; default: those of the system."""
    tls_cert_file: str | None = None
    """Client certificate, if the server requires one."""
    tls_key_file: str | None = None
    """Key of the client certificate."""
    purge_interval_seconds: Interval = 60
    """Interval at which workers delete expired records; 0 disables this."""


MOST_RESULT_BYTES: Final = 400 * 1_024 - 2_048
"""Maximum size of a result with its media type in DynamoDB: an item may have 400 KiB, and the rest of a record needs
less than 2 KiB."""


class DynamodbStoreSettings(Section):
    """Records in Amazon DynamoDB.  Credentials come from the standard AWS sources, not from these settings."""

    kind: Literal["dynamodb"]
    """Kind of store."""
    table: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{3,255}$")] = "idempotency"
    """Name of the table; `integr8s-idem store migrate` creates it."""
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")] | None = None
    """AWS region; default: that of the environment or the profile."""
    endpoint_url: Annotated[str, AfterValidator(dynamodb_url), WITHOUT_SECRET] | None = None
    """http://host:port of a DynamoDB outside AWS, such as DynamoDB Local."""
    timeout_seconds: Seconds = 5
    """Timeout of one call, including retries after throttling, after which it raises StoreUnavailableError."""
    max_connections: Count = 32
    """Maximum number of concurrent requests per service, each on its own connection."""
    count_interval_seconds: Seconds = 3600
    """Minimum interval between counts of active keys; each count reads, and is billed for, the whole table."""


class MemoryStoreSettings(Section):
    """Records in the memory of this process, for tests and first steps.  They are lost on exit."""

    kind: Literal["memory"]
    """Kind of store."""


def _redis_by_default(store: object) -> object:
    if not isinstance(store, dict):
        return store
    kind = store.get("kind", "redis")
    # pydantic formats an unknown kind in its error message, which fails for a number with thousands of digits.
    return {**store, "kind": kind if isinstance(kind, str) else type(kind).__name__}


_StoreByKind: TypeAlias = Annotated[
    RedisStoreSettings
    | RedisClusterStoreSettings
    | RedisSentinelStoreSettings
    | PostgresqlStoreSettings
    | SqliteStoreSettings
    | MysqlStoreSettings
    | DynamodbStoreSettings
    | MemoryStoreSettings,
    Field(discriminator="kind"),
]


StoreSettings: TypeAlias = Annotated[_StoreByKind, BeforeValidator(_redis_by_default)]
"""Selected by `kind`; a table without `kind` is Redis."""


AnyRedisSettings: TypeAlias = RedisStoreSettings | RedisClusterStoreSettings | RedisSentinelStoreSettings
