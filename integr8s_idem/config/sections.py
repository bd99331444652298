"""The sections of settings.toml except `[idempotency]`.  Docstrings are the comments in settings.example.toml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StringConstraints, model_validator

from integr8s_idem.codecs import Envelope
from integr8s_idem.config.durations import delay_in_name
from integr8s_idem.config.idempotency import (
    NOT_BOOL,
    Count,
    OnFailure,
    OnInProgress,
    OnStoreError,
    Seconds,
    Section,
)
from integr8s_idem.config.store_sections import WITHOUT_SECRET
from integr8s_idem.config.urls import (
    brokers,
    collector_url,
    one_or_many,
)


def _zero_or_at_least_a_hundredth(share: float) -> float:
    # The pause after an isolated run is its duration divided by the share, which would be days for a tiny share.
    if 0 < share < 0.01:
        raise ValueError(f"{share:g} would make events wait too long; set 0, or a value from 0.01 to 1")
    return share


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
    group_instance_id: Annotated[str, Field(pattern=r"^(?:[A-Za-z0-9._-]|\{hostname\}){1,200}$")] | None = None
    """Makes workers static members of their groups: an id that a worker keeps when it restarts, such as {hostname}."""
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


class FailureRuleSettings(Section):
    """What happens after an attempt of a handler that failed with an error."""

    error: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(one_or_many)]
    """Errors by their dotted names, such as httpx.TransportError; subclasses are included."""
    action: Literal["retry", "retry_later", "dead_letter", "discard", "stop"]
    """What happens: see docs/how-to/handle-failures.md."""
    attempts: Count | None = None
    """For retry and retry_later: maximum attempts, including the first; default: max_attempts of the service."""
    delay_seconds: Seconds | None = None
    """For retry_later: the pause before each attempt."""
    first_pause_seconds: Seconds | None = None
    """For retry: maximum pause before the second attempt; default: retry_initial_seconds of the service."""
    longest_pause_seconds: Seconds | None = None
    """For retry: maximum pause before any attempt; default: retry_max_seconds of the service."""
    jitter: bool | None = None
    """For retry: false for pauses of exactly their maximum. Default: random pauses."""
    through_causes: bool = False
    """Also match errors that were raised from one of these."""

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        """Reject options that the action does not have, which would be ignored."""
        allowed = _OPTIONS_OF_ACTIONS.get(self.action, ())
        for name in ("attempts", "delay_seconds", "first_pause_seconds", "longest_pause_seconds", "jitter"):
            if getattr(self, name) is not None and name not in allowed:
                raise ValueError(f'{name} does not apply to action = "{self.action}"; remove it')
        if self.action == "retry_later" and self.delay_seconds is None:
            raise ValueError('action = "retry_later" needs delay_seconds, as in delay_seconds = 300')
        first, longest = self.first_pause_seconds, self.longest_pause_seconds
        if first is not None and longest is not None and first > longest:
            raise ValueError(f"first_pause_seconds = {first:g} exceeds longest_pause_seconds = {longest:g}")
        return self


_OPTIONS_OF_ACTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "retry": ("attempts", "first_pause_seconds", "longest_pause_seconds", "jitter"),
    "retry_later": ("attempts", "delay_seconds"),
}


RetryDelay: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,4}[smhd]$")]
"""A duration as part of the name of a topic, such as `10m`."""


def _ascending(delays: tuple[str, ...]) -> tuple[str, ...]:
    lengths = list(map(delay_in_name, delays))
    if lengths != sorted(set(lengths)):
        raise ValueError("each delay must be longer than the one before")
    return delays


class ServiceSettings(Section):
    """How a service consumes events."""

    mode: Literal["enforce", "observe"] = "enforce"
    """enforce: duplicates do not run; observe: they run and are counted. See docs/how-to/adopt.md."""
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
    """Maximum number of handlers that run at the same time, except for isolated runs: see isolation_seconds."""
    max_in_flight: Count = 1_000
    """Number of deliveries that were fetched but not settled at which fetching pauses.

    Unless ordering is "none", a quarter of it is kept for the partitions, in equal parts.
    """
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
    failures: tuple[FailureRuleSettings, ...] = ()
    """Rules for errors of handlers, after those in the code: see docs/how-to/handle-failures.md."""
    retry_topics: Annotated[tuple[RetryDelay, ...], AfterValidator(_ascending)] = ()
    """Delays of topics in which events of overtaking handlers wait for retries, such as ["1m", "10m", "1h"], ascending:
    see docs/how-to/retry-later.md."""
    commit_interval_seconds: Seconds = 1
    """Interval between commits of offsets."""
    drain_timeout_seconds: Seconds = 20
    """Time for running handlers to finish at shutdown or rebalance; less than the grace period of the pod."""
    isolation_share: Annotated[float, Field(ge=0, le=1), NOT_BOOL, AfterValidator(_zero_or_at_least_a_hundredth)] = 0.5
    """Maximum share of the time, at least 0.01, for isolated runs of events that may have crashed workers.  0 disables
    them: each crash counts toward max_attempts."""
    isolation_seconds: Annotated[float, Field(gt=0, le=86_400), NOT_BOOL] = 30
    """Maximum time to wait for running handlers, and for the isolated run that follows.

    A run that takes longer runs on in addition to `concurrency` others.
    """
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
    messaging_metrics: bool = False
    """Add the metrics of OpenTelemetry's messaging conventions, messaging_*."""
    keys_active_interval_seconds: Seconds = 30
    """Interval at which the active keys in the store are counted."""
    spans: Literal["off", "otlp", "console"] = "off"
    """Destination of spans. If only otlp_endpoint is set, it is otlp."""
    otlp_endpoint: Annotated[str, AfterValidator(collector_url), WITHOUT_SECRET] | None = None
    """Collector for spans: http://host:4318 (HTTP, extra otlp-http) or http://host:4317 (gRPC, extra otlp-grpc)."""
    sample_ratio: Annotated[float, Field(ge=0, le=1), NOT_BOOL] = 1.0
    """Share of traces to record, unless the producer has decided."""
    span_keys: bool = False
    """Add idempotency keys to spans and log records. They may contain personal data."""
    otlp_logs: bool = False
    """Send log records to the collector, too."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Minimum severity of log messages."""
