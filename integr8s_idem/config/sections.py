"""The sections of settings.toml beside `[idempotency]`.  Each docstring is the line in settings.example.toml."""

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


def _zero_or_a_hundredth(share: float) -> float:
    # After a turn the next one waits for the time of the turn divided by the share: for days, if that is tiny.
    if 0 < share < 0.01:
        raise ValueError(f"a share of {share:g} would keep events waiting too long: give 0, or from 0.01 to 1")
    return share


WITHOUT_SECRET: Final = PlainSerializer(without_secret, return_type=str, when_used="json-unless-none")
"""For an address: settings written as JSON show no password, as in a log or on a page."""

ClusterUrl: TypeAlias = Annotated[str, AfterValidator(cluster_url), WITHOUT_SECRET]
SentinelAddress: TypeAlias = Annotated[str, AfterValidator(sentinel_address)]
TopicName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
_SHORTEST_SECRET: Final = 32


def _replay_secret(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value()
    if len(text) < _SHORTEST_SECRET:
        raise ValueError(
            f"must have {_SHORTEST_SECRET} characters or more, as anybody can try short ones on a signed message; "
            "make one: openssl rand -hex 32"
        )
    if "," in text or not text.isprintable() or " " in text:
        raise ValueError("must not hold a comma, a space or a line break; make one: openssl rand -hex 32")
    return secret


ReplaySecret: TypeAlias = Annotated[SecretStr, AfterValidator(_replay_secret)]
# Somebody who takes it for the secret next to it has written that here: a mistake does not repeat it.
UnsignedReplays: TypeAlias = Annotated[
    Literal["refuse", "failed_only", "trust"], Field(json_schema_extra={"writeOnly": True})
]


class KafkaSettings(Section):
    """Where Kafka is, and how its clients behave."""

    bootstrap_servers: Annotated[str, AfterValidator(brokers)] = "localhost:9092"
    """Brokers to ask first, separated by commas."""
    topic_prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]*$", max_length=100)] = ""
    """Put before each event type to make its topic."""
    client_id: str = "integr8s-idem"
    """How brokers name us in their logs and quotas."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How to talk to brokers."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "PLAIN"
    """How to log in where security_protocol starts with SASL."""
    sasl_username: str | None = None
    """User of the brokers."""
    sasl_password: SecretStr | None = None
    """Password of the brokers; better given by the environment."""
    ssl_ca_file: str | None = None
    """Certificates to trust; the system's if not given."""
    auto_offset_reset: Literal["earliest", "latest", "none"] = "earliest"
    """Where a group without offsets starts. latest skips what is there, none refuses to guess."""
    session_timeout_seconds: Seconds = 45
    """A worker silent for this long is out of its group."""
    heartbeat_interval_seconds: Seconds = 3
    """How often a worker tells the group that it lives; at most a third of the session timeout."""
    max_poll_interval_seconds: Seconds = 300
    """A worker whose loop stands for this long leaves its group. Long handlers do not count: the loop goes on."""
    rebalance_timeout_seconds: Seconds = 60
    """How long a rebalance waits for its members; more than drain_timeout_seconds of every service."""
    request_timeout_seconds: Seconds = 10
    """Longest wait for one answer of a broker: commits, publishing, closing."""
    metadata_max_age_seconds: Seconds = 30
    """How soon new topics and partitions are noticed."""
    max_event_bytes: Count = 1_048_576
    """Largest message that is published."""
    dead_letter_suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = ".dlq"
    """Put behind a topic's name to make its dead-letter topic."""
    retention_check: Literal["warn", "refuse", "off"] = "warn"
    """At start, compare ttl and limits with what the topics are set to: warn, refuse to start, or ask nothing (off)."""


class RedisStoreSettings(Section):
    """Records in Redis (6.2 or newer) or Valkey."""

    kind: Literal["redis"] = "redis"
    """Which store: redis, redis-cluster, redis-sentinel, postgresql, sqlite, mysql, dynamodb, or memory for trials."""
    url: Annotated[str, AfterValidator(redis_url), WITHOUT_SECRET] = "redis://localhost:6379/0"
    """redis://host:port/db, rediss:// for TLS, unix:///path for a socket."""
    username: str | None = None
    """ACL user."""
    password: SecretStr | None = None
    """Password; better given by the environment."""
    timeout_seconds: Seconds = 2
    """Longest wait for one answer before StoreUnavailableError."""
    max_connections: Count = 16
    """Most connections of one service; batching needs few."""
    tls_ca_file: str | None = None
    """Certificates to trust with rediss://; the system's if not given."""
    tls_cert_file: str | None = None
    """Our certificate, where the server asks for one."""
    tls_key_file: str | None = None
    """Key of our certificate."""
    wait_replicas: Annotated[int, Field(ge=0, le=100), NOT_BOOL] = 0
    """Replicas that must confirm each write; with fewer, calls fail. 0 trusts the primary alone."""
    wait_timeout_seconds: Seconds = 1
    """How long they may take; less than timeout_seconds."""


class RedisClusterStoreSettings(Section):
    """Records in a Redis Cluster."""

    kind: Literal["redis-cluster"]
    """Which store."""
    urls: Annotated[tuple[ClusterUrl, ...], BeforeValidator(one_or_many), Field(min_length=1)] = (
        "redis://localhost:6379",
    )
    """Servers to ask first, all with the same user and password: redis://host:port, rediss:// for TLS."""
    username: str | None = None
    """ACL user."""
    password: SecretStr | None = None
    """Password; better given by the environment."""
    timeout_seconds: Seconds = 2
    """Longest wait for one answer, redirects included, before StoreUnavailableError."""
    max_connections: Count = 16
    """Most connections of one service to one server; batching needs few."""
    tls_ca_file: str | None = None
    """Certificates to trust with rediss://; the system's if not given."""
    tls_cert_file: str | None = None
    """Our certificate, where the server asks for one."""
    tls_key_file: str | None = None
    """Key of our certificate."""
    wait_replicas: Annotated[int, Field(ge=0, le=100), NOT_BOOL] = 0
    """Replicas that must confirm each write; with fewer, calls fail. 0 trusts the primary alone."""
    wait_timeout_seconds: Seconds = 1
    """How long they may take; less than timeout_seconds."""


class RedisSentinelStoreSettings(Section):
    """Records in the Redis that Sentinels name as the primary."""

    kind: Literal["redis-sentinel"]
    """Which store."""
    sentinels: Annotated[tuple[SentinelAddress, ...], BeforeValidator(one_or_many), Field(min_length=1)] = (
        "localhost:26379",
    )
    """Sentinels, as host:port; one that answers is enough."""
    master_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "mymaster"
    """What the Sentinels call the primary and its replicas."""
    database: Annotated[int, Field(ge=0), NOT_BOOL] = 0
    """Number of the database."""
    username: str | None = None
    """ACL user of the primary."""
    password: SecretStr | None = None
    """Password of the primary; better given by the environment."""
    sentinel_username: str | None = None
    """ACL user of the Sentinels."""
    sentinel_password: SecretStr | None = None
    """Password of the Sentinels, which do not take that of the primary; better given by the environment."""
    timeout_seconds: Seconds = 2
    """Longest wait for one answer, finding the primary included, before StoreUnavailableError."""
    max_connections: Count = 16
    """Most connections of one service; batching needs few."""
    tls: bool = False
    """Talk TLS, to Sentinels and Redis."""
    tls_ca_file: str | None = None
    """Certificates to trust with tls; the system's if not given."""
    tls_cert_file: str | None = None
    """Our certificate, where the server asks for one."""
    tls_key_file: str | None = None
    """Key of our certificate."""
    wait_replicas: Annotated[int, Field(ge=0, le=100), NOT_BOOL] = 0
    """Replicas that must confirm each write; with fewer, calls fail. 0 trusts the primary alone."""
    wait_timeout_seconds: Seconds = 1
    """How long they may take; less than timeout_seconds."""


class PostgresqlStoreSettings(Section):
    """Records in PostgreSQL (15 or newer)."""

    kind: Literal["postgresql"]
    """Which store."""
    url: Annotated[str, AfterValidator(postgresql_url), WITHOUT_SECRET] = "postgresql://localhost:5432/postgres"
    """postgresql://host:port/database; its tables are made by `integr8s-idem store migrate`."""
    username: str | None = None
    """User of the database."""
    password: SecretStr | None = None
    """Password; better given by the environment."""
    timeout_seconds: Seconds = 5
    """Longest wait for one answer, a connection included, before StoreUnavailableError."""
    lock_timeout_seconds: Seconds = 2
    """Longest wait for a record that another transaction holds."""
    max_connections: Count = 8
    """Most connections of one service."""
    tls: bool = False
    """Talk TLS; the server's certificate and name are checked."""
    tls_ca_file: str | None = None
    """Certificates to trust with tls; the system's if not given."""
    tls_cert_file: str | None = None
    """Our certificate, where the server asks for one."""
    tls_key_file: str | None = None
    """Key of our certificate."""
    purge_interval_seconds: Interval = 60
    """How often a worker takes expired records away; 0 for never."""


class SqliteStoreSettings(Section):
    """Records in a SQLite file, for a single machine where no server is wanted.  Its tables are made at start."""

    kind: Literal["sqlite"]
    """Which store."""
    path: str = "idempotency.db"
    """The file; not on a network disk."""
    timeout_seconds: Seconds = 5
    """Longest wait for one answer before StoreUnavailableError."""
    lock_timeout_seconds: Seconds = 2
    """Longest wait for another process that writes."""
    purge_interval_seconds: Interval = 60
    """How often a worker takes expired records away; 0 for never."""


class MysqlStoreSettings(Section):
    """Records in MySQL (8.0.19 or newer) or MariaDB (10.6 or newer)."""

    kind: Literal["mysql"]
    """Which store."""
    url: Annotated[str, AfterValidator(mysql_url), WITHOUT_SECRET] = "mysql://localhost:3306/idempotency"
    """mysql://host:port/database; its tables are made by `integr8s-idem store migrate`."""
    username: str | None = None
    """User of the database."""
    password: SecretStr | None = None
    """Password; better given by the environment."""
    timeout_seconds: Seconds = 5
    """Longest wait for one answer, a connection included, before StoreUnavailableError."""
    lock_timeout_seconds: Count = 2
    """Longest wait for a record that another transaction holds, in whole seconds."""
    max_connections: Count = 8
    """Most connections of one service."""
    tls: bool = False
    """Talk TLS; the server's certificate and name are checked."""
    tls_ca_file: str | None = None
    """Certificates to trust with tls; the system's if not given."""
    tls_cert_file: str | None = None
    """Our certificate, where the server asks for one."""
    tls_key_file: str | None = None
    """Key of our certificate."""
    purge_interval_seconds: Interval = 60
    """How often a worker takes expired records away; 0 for never."""


MOST_RESULT_BYTES: Final = 400 * 1_024 - 2_048
"""Of a result with its media type in DynamoDB: an item may have 400 KiB, names included; the rest of a record has less
than 2."""


class DynamodbStoreSettings(Section):
    """Records in Amazon DynamoDB.  Credentials are found as every AWS program finds them; there are none here."""

    kind: Literal["dynamodb"]
    """Which store."""
    table: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{3,255}$")] = "idempotency"
    """The table; it is made by `integr8s-idem store migrate`."""
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,63}$")] | None = None
    """AWS region; that of the environment or the profile if not given."""
    endpoint_url: Annotated[str, AfterValidator(dynamodb_url), WITHOUT_SECRET] | None = None
    """http://host:port of a DynamoDB that is not AWS's own, such as DynamoDB Local."""
    timeout_seconds: Seconds = 5
    """Longest wait for one answer, repetitions after throttling included, before StoreUnavailableError."""
    max_connections: Count = 32
    """Most requests of one service at once, each on a connection of its own."""
    count_interval_seconds: Seconds = 3600
    """Active keys are counted this often at most: each time the whole table is read, and paid for."""


class MemoryStoreSettings(Section):
    """Records in this process: for tests and first steps.  Forgets everything at exit."""

    kind: Literal["memory"]
    """Which store."""


def _redis_by_default(store: object) -> object:
    if not isinstance(store, dict):
        return store
    kind = store.get("kind", "redis")
    # pydantic writes a kind that is none into its message, and cannot with a number of thousands of digits.
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
"""By `kind`; a table without one is Redis."""

AnyRedisSettings: TypeAlias = RedisStoreSettings | RedisClusterStoreSettings | RedisSentinelStoreSettings


class ServiceSettings(Section):
    """How one service consumes."""

    group_id: str | None = None
    """Consumer group; the service's name if not given."""
    topics: Annotated[tuple[TopicName, ...], Field(min_length=1)] | None = None
    """Topics to read; those of the router's events if not given."""
    envelope: Envelope = "native"
    """How events lie in messages: native (the body is the event), cloudevents (1.0), or wrapped (in data)."""
    event_id_header: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,100}$")] | None = None
    """Kafka header that names the event, instead of its event_id."""
    ordering: Literal["partition", "key", "none"] = "partition"
    """What is handled in order: a partition, the events of one Kafka key, or nothing."""
    concurrency: Annotated[int, Field(ge=1, le=10_000), NOT_BOOL] = 64
    """Handlers running at once."""
    max_in_flight: Count = 1_000
    """Deliveries taken from the broker and not settled yet, before fetching pauses."""
    max_in_flight_bytes: Annotated[int, Field(ge=1_024, le=2**40), NOT_BOOL] = 67_108_864
    """Their bodies together, before fetching pauses."""
    max_attempts: Count | None = None
    """Attempts at one event before it is given up; that of [idempotency] if not given."""
    handler_timeout_seconds: Seconds | None = None
    """A handler is cancelled after this long; less than the lease. Not given: it may run while its lease is renewed."""
    retry_initial_seconds: Seconds = 0.5
    """Pause before the first retry, at most; doubled each time, with full jitter."""
    retry_max_seconds: Seconds = 30
    """Longest pause between retries."""
    commit_interval_seconds: Seconds = 1
    """Offsets are committed this often."""
    drain_timeout_seconds: Seconds = 20
    """How long running handlers may finish at a shutdown or rebalance; less than the pod's grace period."""
    isolation_share: Annotated[float, Field(ge=0, le=1), NOT_BOOL, AfterValidator(_zero_or_a_hundredth)] = 0.5
    """Largest share of the time for running events alone that may have crashed workers, from 0.01 on.  0 runs none of
    them alone: each crash counts toward max_attempts."""
    isolation_seconds: Annotated[float, Field(gt=0, le=86_400), NOT_BOOL] = 30
    """Longest time for which it waits for running handlers to end, and then runs alone."""
    on_in_progress: OnInProgress | None = None
    """As in [idempotency], for this service."""
    on_failure: OnFailure | None = None
    """As in [idempotency], for this service."""
    on_store_error: OnStoreError | None = None
    """As in [idempotency], for this service."""


class ReplaySettings(Section):
    """Replays of dead letters: which messages may ask to be handled anew, or by one group and handler only."""

    secret: Annotated[tuple[ReplaySecret, ...], BeforeValidator(one_or_many)] = ()
    """Signs replays, for all services; better given by the environment. Of several the first signs, any verifies."""
    unsigned: UnsignedReplays | None = None
    """Replay headers that are not signed with the secret. Not given: refuse with a secret, failed_only without one."""

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The secrets, as keys of an HMAC."""
        return tuple(secret.get_secret_value().encode() for secret in self.secret)

    @property
    def unsigned_policy(self) -> UnsignedReplays:
        """`unsigned`, or what it is if not given."""
        return self.unsigned or ("refuse" if self.secret else "failed_only")


class TelemetrySettings(Section):
    """Metrics, health and spans."""

    metrics_host: str = "127.0.0.1"
    """Address of /metrics, /healthz and /readyz; 0.0.0.0 in a container."""
    metrics_port: Annotated[int, Field(ge=0, le=65_535), NOT_BOOL] = 9464
    """Port of /metrics, /healthz and /readyz; 0 takes a free one."""
    metrics_enabled: bool = True
    """Serve /metrics, /healthz and /readyz."""
    keys_active_interval_seconds: Seconds = 30
    """How often the active keys are counted in the store."""
    spans: Literal["off", "otlp", "console"] = "off"
    """Where spans go. An otlp_endpoint alone means otlp."""
    otlp_endpoint: Annotated[str, AfterValidator(collector_url), WITHOUT_SECRET] | None = None
    """Collector for spans: http://host:4318 (HTTP, extra otlp-http) or http://host:4317 (gRPC, extra otlp-grpc)."""
    sample_ratio: Annotated[float, Field(ge=0, le=1), NOT_BOOL] = 1.0
    """Share of traces recorded, where the producer has not decided."""
    span_keys: bool = False
    """Put idempotency keys into spans. They may hold personal data."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severe log lines to show."""
