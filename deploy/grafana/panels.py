"""The panels of the dashboard by row: queries, and descriptions with remedies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

SELECTED: Final = '{service=~"$service", instance=~"$instance"}'
"""Label matchers for the variables of the dashboard."""
GUIDE: Final = "docs/how-to/answer-an-alert.md"


@dataclass(frozen=True)
class Query:
    """A Prometheus query."""

    expr: str
    legend: str = "{{service}}"
    exemplars: bool = False
    """Whether to show recorded traces as points."""


@dataclass(frozen=True)
class Panel:
    """A panel.  `steps` are thresholds with their colors; `texts` replace values."""

    title: str
    queries: tuple[Query, ...]
    description: str
    unit: str = "short"
    steps: tuple[tuple[float | None, str], ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    width: int = 8
    height: int = 8
    is_stat: bool = False
    bars: bool = False


@dataclass(frozen=True)
class Row:
    """A row of panels with a title."""

    title: str
    panels: tuple[Panel, ...]


NONE_IS_GOOD: Final = ((None, "green"), (1, "red"))
NONE_IS_BAD: Final = ((None, "red"), (1, "green"))


def stat(
    title: str, expr: str, description: str, steps: tuple[tuple[float | None, str], ...], texts: Mapping[str, str] = {}
) -> Panel:
    """A single number, colored by thresholds."""
    return Panel(title, (Query(expr, title),), description, "short", steps, texts, width=4, height=4, is_stat=True)


def per_second(title: str, signal: str, description: str, legend: str = "{{service}}") -> Panel:
    """A rate per second, with a line for each service, or for the labels in `legend`."""
    return Panel(title, (Query(rate(signal, legend), legend),), description, "ops")


def per_minute(title: str, description: str, *signals: str, legend: str = "{{service}}") -> Panel:
    """A rate per minute of rare events, with a bar for each service and signal."""
    has_several = len(signals) > 1
    return Panel(
        title,
        tuple(
            Query(f"60 * {rate(signal, legend)}", f"{legend} {signal.replace('_', ' ')}" if has_several else legend)
            for signal in signals
        ),
        description,
        "cpm",
        bars=True,
    )


def rate(signal: str, legend: str = "{{service}}") -> str:
    """A query for a rate per second, by the labels in the legend."""
    labels = ", ".join(part.partition("}}")[0] for part in legend.split("{{")[1:])
    return f"sum by ({labels}) (rate(idempotency_{signal}_total{SELECTED}[$__rate_interval]))"


def percentile(share: float, histogram: str, labels: str, legend: str) -> Query:
    """A query for a percentile in seconds."""
    counted = f"sum by (le, {labels}) (rate({histogram}_seconds_bucket{SELECTED}[$__rate_interval]))"
    has_exemplars = histogram.startswith("idempotency_")
    return Query(f"histogram_quantile({share}, {counted})", f"{legend} p{share * 100:g}", has_exemplars)


def gap_percentile(share: float) -> Query:
    """A query for a percentile of the time until an observed duplicate, which is rare and has no exemplars."""
    counted = f"sum by (le, service) (increase(idempotency_observed_gap_seconds_bucket{SELECTED}[1h]))"
    return Query(f"histogram_quantile({share}, {counted})", f"{{{{service}}}} p{share * 100:g}")


DEAD_LETTERS: Final = f"idempotency_dead_letters_total{SELECTED}"
_NEW_DEAD_LETTERS: Final = f"(increase({DEAD_LETTERS}[1h]) > 0) or ({DEAD_LETTERS} > 0 unless {DEAD_LETTERS} offset 1h)"

HEALTH: Final = Row(
    "Health",
    (
        stat(
            "Workers up",
            'sum(up{job="integr8s-idem", instance=~"$instance"})',
            "Processes that Prometheus can scrape. If there are none, nothing is handled. Check their pods, and "
            f"the end of their logs. See IdempotencyWorkerUnreachable and IdempotencyNoWorker in {GUIDE}.",
            NONE_IS_BAD,
        ),
        stat(
            "Workers down",
            'count(up{job="integr8s-idem", instance=~"$instance"} == 0) or vector(0)',
            "Targets that Prometheus cannot scrape. Their events are taken over within a lease; find out why they do "
            f"not answer. See IdempotencyWorkerUnreachable in {GUIDE}.",
            NONE_IS_GOOD,
        ),
        stat(
            "Store",
            f"min(idempotency_store_up{SELECTED})",
            "Down: at least one worker gets no answer and is paused; it neither loses nor handles events. Restore the "
            f"store; the workers resume by themselves. See IdempotencyStoreDown in {GUIDE}.",
            NONE_IS_BAD,
            {"0": "DOWN", "1": "up"},
        ),
        stat(
            "Lag",
            f"sum(idempotency_consumer_lag{SELECTED})",
            "Unsettled messages of all topics. If it grows, add workers, up to the number of partitions, or find out "
            f"what is slow in the row Latency. See IdempotencyConsumerLagGrows in {GUIDE}.",
            ((None, "green"), (1_000, "yellow"), (10_000, "red")),
        ),
        stat(
            "Dead letters in 1 h",
            f"round(sum({_NEW_DEAD_LETTERS}) or vector(0))",
            "Dead-lettered messages. Nothing is lost: read the reasons with integr8s-idem dlq list, fix the cause, and "
            "replay them with integr8s-idem dlq replay. "
            f"See IdempotencyDeadLetters in {GUIDE}.",
            NONE_IS_GOOD,
        ),
        stat(
            "Alerts",
            'count(ALERTS{alertname=~"Idempotency.*", alertstate="firing"}) or vector(0)',
            f"Alerts of deploy/prometheus/alerts.yml that fire now. Each has a section in {GUIDE}.",
            NONE_IS_GOOD,
        ),
    ),
)

FLOW: Final = Row(
    "Flow",
    (
        per_second(
            "Delivered",
            "deliveries",
            "Deliveries taken from Kafka, duplicates included. Zero while lag is above zero: the workers are stuck, "
            f"see IdempotencyNothingHandled in {GUIDE}.",
        ),
        per_second(
            "Handled",
            "events_handled",
            "Deliveries whose handler returned. Well below Delivered without duplicates: handlers fail, look at the "
            "row Problems.",
            "{{service}} {{event_type}}",
        ),
        per_second(
            "Duplicates blocked",
            "duplicates_blocked",
            "Deliveries whose handler did not run, since the work was done. Much more than usual: a producer repeats "
            "events, or offsets are not committed; see Commits and rebalances.",
        ),
        Panel(
            "Known and new keys",
            (Query(rate("cache_hits"), "{{service}} known"), Query(rate("cache_misses"), "{{service}} new")),
            "Reservations of known and of new keys. Known keys increase with duplicates, which alone is not a problem.",
            "ops",
        ),
        Panel(
            "Share of duplicates",
            (Query(f"{rate('cache_hits')} / ({rate('cache_hits')} + {rate('cache_misses')})"),),
            "The share of reservations whose key was known. A jump: a topic is replayed, or a producer sends "
            "everything twice. No line: no events.",
            "percentunit",
        ),
        per_second(
            "Published",
            "events_published",
            "Outgoing events that the brokers have confirmed. Zero although handlers publish events: see Outbox, and "
            "search the log for PublishError.",
            "{{service}} {{event_type}}",
        ),
    ),
)

PROBLEMS: Final = Row(
    "Problems",
    (
        per_minute(
            "Dead letters",
            "Dead-lettered messages by reason. List them with integr8s-idem dlq list --group, fix the cause, and "
            "replay them with integr8s-idem dlq replay: docs/how-to/replay-a-dead-letter.md. "
            f"See IdempotencyDeadLetters in {GUIDE}.",
            "dead_letters",
            legend="{{service}} {{reason}}",
        ),
        per_minute(
            "Failures and retries",
            "Runs of handlers that raised or timed out, deliveries to be retried, copies in retry topics, events "
            "discarded by a rule, questions to reconcile functions, services that a rule has stopped, and events of an "
            "outbox that the broker did not accept. "
            "Rising: read the tracebacks in the log; events that keep failing are dead-lettered. "
            f"See IdempotencyHandlersFail in {GUIDE}.",
            "handler_failures",
            "retries",
            "retry_copies",
            "events_discarded",
            "reconciliations",
            "services_stopped",
            "outbox_failures",
        ),
        per_minute(
            "Takeovers, prevented late starts, isolated runs",
            "Work taken over after an expired lease, handlers that were not started on an expired lease, and events "
            "that run alone because they may have crashed workers. A few are normal when a worker is killed; a steady "
            f"rate means that workers keep crashing or stalling. See IdempotencyTakeovers in {GUIDE}.",
            "takeovers",
            "stale_starts_prevented",
            "isolated_runs",
        ),
        per_minute(
            "Lost reservations and late completions",
            "Runs that lost their reservation before they finished, and outcomes for partitions that had been revoked. "
            "Raise processing_timeout_seconds or drain_timeout_seconds, or find what blocks the event loop. "
            f"See IdempotencyReservationsLost in {GUIDE}.",
            "reservations_lost",
            "stale_completions",
        ),
        per_minute(
            "Store errors",
            "Failed store calls; each was retried or paused the worker. Check the load of the store and the "
            f"network. See IdempotencyStoreErrors in {GUIDE}.",
            "store_errors",
        ),
        per_minute(
            "Store data losses, failovers, restarts, vanished records",
            "In each case the store may have lost records, and work may be done twice. Find out what happened to the "
            f"server, and make it durable: docs/how-to/prepare-redis.md. See IdempotencyStoreDataLost in {GUIDE}.",
            "store_data_losses",
            "store_failovers",
            "store_restarts",
            "records_vanished",
        ),
        per_minute(
            "Refused replays",
            "Messages with refused replay headers by reason, handled as ordinary deliveries; and replays for other "
            "consumer groups, which are skipped. If you do not replay, check who may publish to the topics: "
            "docs/how-to/replay-a-dead-letter.md.",
            "replays_refused",
            "replays_for_other_groups",
        ),
        per_minute(
            "Undecodable messages",
            "Messages that cannot be decoded as a known event, by reason; they are dead-lettered unchanged. Usually a "
            "producer writes another format: compare its version with that of the service.",
            "undecodable_messages",
            legend="{{service}} {{reason}}",
        ),
        per_minute(
            "Unreadable records, reused keys",
            "Corrupt records in the store, and keys that were used for different payloads. Another program writes "
            "under the key prefix, or a producer reuses an id. "
            f"See IdempotencyCorruptRecords and IdempotencyKeysReused in {GUIDE}.",
            "corrupt_records",
            "keys_reused",
        ),
        per_minute(
            "Unguarded runs",
            "Handlers that ran without the guard, because on_store_error or on_key_reused permits it. Each event may "
            f"have been a duplicate. See IdempotencyUnguardedRuns in {GUIDE}.",
            "unguarded_runs",
        ),
        per_minute(
            "Commits and rebalances",
            "Failed commits, and rebalances. A few are normal at each deployment; a steady rate means that workers "
            f"keep leaving the group, see Event loop. See IdempotencyCommitsFail in {GUIDE}.",
            "commit_failures",
            "rebalances",
        ),
        per_minute(
            "Damaged partitions",
            "Partitions that are paused because a batch cannot be read. They do not recover by themselves. "
            f"See IdempotencyPartitionDamaged in {GUIDE}.",
            "damaged_partitions",
        ),
        per_minute(
            "Waits",
            "Deliveries that waited for a run elsewhere, by event type. A few are normal after a rebalance or a crash; "
            "many: a producer sends events twice at the same time, or workers keep crashing. "
            f"See IdempotencyLongWaits in {GUIDE}.",
            "waits",
            legend="{{service}} {{event_type}}",
        ),
        per_minute(
            "Dropped results, orphaned steps",
            "Results that were too large to store (raise "
            "max_result_size_bytes or return less); recorded steps that the last run did not request (a step was "
            "renamed while events were in progress).",
            "results_dropped",
            "steps_orphaned",
        ),
    ),
)

LATENCY: Final = Row(
    "Latency",
    (
        Panel(
            "Processing time",
            tuple(percentile(share, "idempotency_processing", "service", "{{service}}") for share in (0.5, 0.95, 0.99)),
            "From decoding until the delivery is settled. If it is slow, the next panel shows in which phase; each "
            "point is the trace of one delivery, if Prometheus keeps exemplars: docs/how-to/set-up-dashboards.md.",
            "s",
        ),
        Panel(
            "Phases, p95",
            (percentile(0.95, "idempotency_phase", "service, phase", "{{service}} {{phase}}"),),
            "handle is your handler; reserve and complete are the store, see docs/explanation/speed.md for expected "
            "times; wait is waiting for a run elsewhere. "
            f"See IdempotencyLongWaits in {GUIDE}.",
            "s",
        ),
        Panel(
            "Store operations, p99",
            (
                percentile(
                    0.99,
                    "db_client_operation_duration",
                    "service, db_system_name, db_query_summary",
                    "{{service}} {{db_system_name}} {{db_query_summary}}",
                ),
            ),
            "Calls to the store, as the worker sees them: the network and the wait for a connection count. A batch is "
            f"one call. Slow: check the load of the store and the network. See IdempotencyStoreSlow in {GUIDE}.",
            "s",
        ),
        Panel(
            "Store operations",
            (
                Query(
                    "sum by (service, db_query_summary, error_type) "
                    f"(rate(db_client_operation_duration_seconds_count{SELECTED}[$__rate_interval]))",
                    "{{service}} {{db_query_summary}} {{error_type}}",
                ),
            ),
            "Calls to the store per second, with the type of their error if they failed. Many more than deliveries: "
            f"events arrive one at a time, or many leases are renewed. Errors: see IdempotencyStoreErrors in {GUIDE}.",
            "ops",
        ),
        Panel(
            "Event loop",
            (
                Query(
                    f"max by (service, instance) (idempotency_event_loop_lag_seconds{SELECTED})",
                    "{{service}} {{instance}}",
                ),
            ),
            "Delay of the event loop. Near a second: a handler computes without await; move that to a thread or a "
            "process. Near a third of the session timeout, workers leave the group. "
            f"See IdempotencyEventLoopLag in {GUIDE}.",
            "s",
            steps=((None, "green"), (1, "red")),
        ),
    ),
)

STATE: Final = Row(
    "State",
    (
        Panel(
            "Lag by topic",
            (Query(f"sum by (service, topic) (idempotency_consumer_lag{SELECTED})", "{{service}} {{topic}}"),),
            "Messages between the committed offset and the end. One topic alone: its handler is slow or one of its "
            f"partitions is damaged. See IdempotencyConsumerLagGrows in {GUIDE}.",
        ),
        Panel(
            "In flight",
            (Query(f"sum by (service) (idempotency_in_flight{SELECTED})"),),
            "Unsettled deliveries. At max_in_flight, fetching pauses, which is normal. If it stays there and nothing "
            "is handled, handlers hang: set handler_timeout_seconds.",
        ),
        Panel(
            "Waiting for a limit",
            (Query(f"sum by (service) (idempotency_limit_waiting{SELECTED})"),),
            "Events that wait because at_most events with the same value of their handler's limit_by field are being "
            "handled. Near max_in_flight: one value fills the buffer, and others wait with it; raise max_in_flight.",
        ),
        Panel(
            "Active keys",
            # Every worker reports the same keys of the store, so they must not be summed.
            (Query(f"max by (service) (idempotency_keys_active{SELECTED})"),),
            "Keys with an active lease, including those of dead workers. If there are permanently more than In flight, "
            "workers have died; their leases end after processing_timeout_seconds, and their work is taken over.",
        ),
        Panel(
            "Outbox",
            (Query(f"max by (service) (idempotency_outbox_waiting{SELECTED})"),),
            "Events of committed transactions that wait to be published. If it does not fall, Kafka refuses them or no "
            f"worker of the service runs. See IdempotencyOutboxStuck in {GUIDE}. No line: this store has no outbox.",
        ),
        Panel(
            "Oldest event of the outbox",
            (Query(f"max by (service) (idempotency_outbox_age_seconds{SELECTED})"),),
            "How long the oldest of these events has waited. It grows although others are published: one event is "
            "refused, and the later ones of its Kafka key wait for it. idempotency_outbox_failures_total counts the "
            f"attempts, and the log names the event. See IdempotencyOutboxStuck in {GUIDE}.",
            unit="s",
        ),
        per_second(
            "Result bytes",
            "result_bytes",
            "Bytes of results stored for duplicates. If they fill the store, return less, or set enable_result_caching "
            "to false if the results are not used.",
        ),
        per_second(
            "Records purged",
            "records_purged",
            "Expired records deleted from a SQL store. Zero while its table grows: set purge_interval_seconds above 0. "
            "Redis and DynamoDB expire records by themselves.",
        ),
        Panel(
            "Native code",
            (Query(f"min by (service) (idempotency_native_code{SELECTED})"),),
            "1 if every worker uses integr8s-idem-speedups, otherwise 0. A drop to 0 after a deployment: the image "
            "lacks it or cannot load it; integr8s-idem doctor says why. Events are handled all the same.",
        ),
    ),
)

_OBSERVED_DUPLICATE: Final = SELECTED.replace("}", ', result=~"redelivered|republished|concurrent|unknown"}')

OBSERVE: Final = Row(
    "Observe mode",
    (
        Panel(
            "Observed deliveries",
            (Query(rate("observations", "{{service}} {{result}}"), "{{service}} {{result}}"),),
            "Deliveries of services with mode = observe, by what was found out about them: docs/how-to/adopt.md. "
            "failed or unrecorded: the store did not answer, so the report misses these. No line: all enforce.",
            "ops",
        ),
        Panel(
            "Observed duplicates",
            (
                Query(
                    "60 * sum by (service, result, payload) "
                    f"(rate(idempotency_observations_total{_OBSERVED_DUPLICATE}[$__rate_interval]))",
                    "{{service}} {{result}} {{payload}}",
                ),
            ),
            "Duplicates that a guard would block, by kind: the same message again (redelivered), another message with "
            "the same key (republished), or while the first was running (concurrent). other: with another payload, "
            "which a guard would dead-letter; find out why before you enforce: docs/how-to/adopt.md.",
            "cpm",
            bars=True,
        ),
        Panel(
            "Time until an observed duplicate",
            (
                *(gap_percentile(share) for share in (0.5, 0.99, 0.999)),
                Query(f"min by (service) (idempotency_observe_ttl_seconds{SELECTED})", "{{service}} ttl"),
            ),
            "How long after the first handler the duplicates of the last hour came, and how long records are kept. A "
            "percentile near the ttl: later duplicates look new; observe with a longer one. For a month, use "
            "integr8s-idem observe, or the queries in docs/how-to/adopt.md.",
            "s",
        ),
    ),
)

ROWS: Final = (HEALTH, FLOW, PROBLEMS, LATENCY, STATE, OBSERVE)
