"""The sections of settings.toml except `[idempotency]`.  Docstrings are the comments in settings.example.toml."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr, StringConstraints

from integr8s_idem.codecs import Envelope
from integr8s_idem.config.idempotency import (
    NOT_BOOL,
    Count,
    Interval,
    OnFailure,
    OnInProgress,
    OnStoreError,
    Seconds,
    Section,
)
from integr8s_idem.config.urls import (
    brokers,
    cluster_url,
    collector_url,
    dynamodb_url,
    mysql_url,
    one_or_many,
    postgresql_url,
    redis_url,
    sentinel_address,
    without_secret,
)


def _zero_or_at_least_a_hundredth(share: float) -> float:
    # The pause after an isolated run is its duration divided by the share, which would be days for a tiny share.
    if 0 < share < 0.01:
        raise ValueError(f"{share:g} would make events wait too long; set 0, or a value from 0.01 to 1")
    return share


WITHOUT_SECRET: Final = PlainSerializer(without_secret, return_type=str, when_used="json-unless-none")
"""Serializes an address without its password, for settings that are logged or displayed as JSON."""

ClusterUrl: TypeAlias = Annotated[str, AfterValidator(cluster_url), WITHOUT_SECRET]
SentinelAddress: TypeAlias = Annotated[str, AfterValidator(sentinel_address)]
TopicName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
_SHORTEST_SECRET: Final = 32


def _replay_secret(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value()
    if len(text) < _SHORTEST_SECRET:
        raise ValueError(
            f"must have at least {_SHORTEST_SECRET} characters, since shorter ones can be guessed from signatures; "
            "generate one: openssl rand -hex 32"
        )
    if "," in text or not text.isprintable() or " " in text:
        raise ValueError("must not contain commas, spaces or line breaks; generate one: openssl rand -hex 32")
    return secret


ReplaySecret: TypeAlias = Annotated[SecretStr, AfterValidator(_replay_secret)]
# Marked as secret, so that errors hide the value: users may enter `secret` here by mistake.
UnsignedReplays: TypeAlias = Annotated[
    Literal["refuse", "failed_only", "trust"], Field(json_schema_extra={"writeOnly": True})
]


class KafkaSettings(Section):
    """Addresses of Kafka and behavior of its clients."""

    bootstrap_servers: Annotated[str, AfterValidator(brokers)] = "localhost:9092"
    """Brokers to connect to first, separated by commas."""
    topic_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$", max_length=100)] = ""
    """Prefix of topic names; a topic is this prefix followed by the event type."""
    client_id: str = "integr8s-idem"
    """Name of the clients in logs and quotas of the brokers."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """Protocol for connections to brokers."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    """Authentication mechanism if security_protocol starts with SASL."""
    sasl_username: str | None = None
    """User name for SASL."""
    sasl_password: SecretStr | None = None
    """Password for SASL; preferably set in the environment."""
    ssl_ca_file: str | None = None
    """CA certificates to trust; default: those of the system."""
    auto_offset_reset: Literal["earliest", "latest", "none"] = "earliest"
    """Where a group without offsets starts: latest skips existing events, none raises an error."""
    session_timeout_seconds: Seconds = 45
    """A worker that sends no heartbeat for this long is removed from its group."""
    heartbeat_interval_seconds: Seconds = 3
    """Interval between heartbeats of a worker; at most a third of session_timeout_seconds."""
    max_poll_interval_seconds: Seconds = 300
    """A worker whose loop is blocked for this long leaves its group. Long handlers do not block the loop."""
    rebalance_timeout_seconds: Seconds = 60
    """How long a rebalance waits for its members; more than drain_timeout_seconds of every service."""
    request_timeout_seconds: Seconds = 10
    """Timeout of one request to a broker: commits, publishing, closing."""
    metadata_max_age_seconds: Seconds = 30
    """Interval at which new topics and partitions are discovered."""
    max_event_bytes: Count = 1_048_576
    """Largest message that is published."""
    dead_letter_suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = ".dlq"
    """Suffix of dead-letter topics, after the name of the topic."""
    retention_check: Literal["warn", "refuse", "off"] = "warn"
    """Compare ttl and limits with the settings of the topics at startup: warn, refuse to start, or off."""


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


class ServiceSettings(Section):
    """How a service consumes events."""

    group_id: str | None = None
    """Consumer group; default: the name of the service."""
    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)] | None = None
    """Topics to read; default: the topics of the events in the router."""
    envelope: Envelope = "native"
    """Format of messages: native (the body is the event), cloudevents (1.0), or wrapped (the event is in data)."""
    event_id_header: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,100}$")] | None = None
    """Kafka header with the id of the event, used instead of event_id."""
    ordering: Literal["partition", "key", "none"] = "partition"
    """Order of handling: by partition, by Kafka key, or none."""
    concurrency: Annotated[int, Field(ge=1, le=10_000), NOT_BOOL] = 64
    """Maximum number of handlers that run at the same time."""
    max_in_flight: Count = 1_000
    """Number of deliveries that were fetched but not settled at which fetching pauses."""
    max_in_flight_bytes: Annotated[int, Field(ge=1_024, le=2**40), NOT_BOOL] = 67_108_864
    """Total size of their bodies at which fetching pauses."""
    max_attempts: Count | None = None
    """Attempts per event before it is given up; default: the value in [idempotency]."""
    handler_timeout_seconds: Seconds | None = None
    """A handler is cancelled after this long; less than the lease. Default: no limit while the lease is renewed."""
    retry_initial_seconds: Seconds = 0.5
    """Maximum pause before the first retry; doubled for each further retry, with full jitter."""
    retry_max_seconds: Seconds = 30
    """Maximum pause between retries."""
    commit_interval_seconds: Seconds = 1
    """Interval between commits of offsets."""
    drain_timeout_seconds: Seconds = 20
    """Time for running handlers to finish at shutdown or rebalance; less than the grace period of the pod."""
    isolation_share: Annotated[float, Field(ge=0, le=1), NOT_BOOL, AfterValidator(_zero_or_at_least_a_hundredth)] = 0.5
    """Maximum share of the time, at least 0.01, for isolated runs of events that may have crashed workers.  0 disables
    them: each crash counts toward max_attempts."""
    isolation_seconds: Annotated[float, Field(gt=0, le=86_400), NOT_BOOL] = 30
    """Maximum time to wait for running handlers, and for the isolated run that follows."""
    on_in_progress: OnInProgress | None = None
    """Overrides [idempotency] for this service."""
    on_failure: OnFailure | None = None
    """Overrides [idempotency] for this service."""
    on_store_error: OnStoreError | None = None
    """Overrides [idempotency] for this service."""


class ReplaySettings(Section):
    """Replays of dead letters: which messages may request to be handled again, or by a single group and handler."""

    secret: Annotated[tuple[ReplaySecret, ...], BeforeValidator(one_or_many)] = ()
    """Signs replays for all services; preferably set in the environment. The first signs; all of them verify."""
    unsigned: UnsignedReplays | None = None
    """Policy for replay headers without a valid signature. Default: refuse if secret is set, else failed_only."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The secrets, as keys of an HMAC."""
        return tuple(secret.get_secret_value().encode() for secret in self.secret)

    @property
    def unsigned_policy(self) -> UnsignedReplays:
        """`unsigned`, or its default."""
        return self.unsigned or ("refuse" if self.secret else "failed_only")


class TelemetrySettings(Section):
    """Metrics, health and spans."""

    metrics_host: str = "127.0.0.1"
    """Listening address of /metrics, /healthz and /readyz; 0.0.0.0 in a container."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535), NOT_BOOL] = 9464
    """Port of /metrics, /healthz and /readyz; 0 picks a free port."""
    metrics_enabled: bool = True
    """Serve /metrics, /healthz and /readyz."""
    keys_active_interval_seconds: Seconds = 30
    """Interval at which the active keys in the store are counted."""
    spans: Literal["off", "otlp", "console"] = "off"
    """Destination of spans. If only otlp_endpoint is set, it is otlp."""
    otlp_endpoint: Annotated[str, AfterValidator(collector_url), WITHOUT_SECRET] | None = None
    """Collector for spans: http://host:4318 (HTTP, extra otlp-http) or http://host:4317 (gRPC, extra otlp-grpc)."""
    sample_ratio: Annotated[float, Field(ge=0, le=1), NOT_BOOL] = 1.0
    """Share of traces to record, unless the producer has decided."""
    span_keys: bool = False
    """Add idempotency keys to spans. They may contain personal data."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum severity of log messages."""
