"""What the dashboard shows, row by row: the question, the queries, and what to do when the answer is bad."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

CHOSEN: Final = '{service=~"$service", instance=~"$instance"}'
"""What the two lists on top of the dashboard choose."""
GUIDE: Final = "docs/how-to/answer-an-alert.md"


@dataclass(frozen=True)
class Query:
    """One question to Prometheus."""

    expr: str
    legend: str = "{{service}}"


@dataclass(frozen=True)
class Panel:
    """One panel.  `steps` are values with the color from there on; `words` are what values of a number mean."""

    title: str
    queries: tuple[Query, ...]
    description: str
    unit: str = "short"
    steps: tuple[tuple[float | None, str], ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    width: int = 8
    height: int = 8
    is_stat: bool = False
    bars: bool = False


@dataclass(frozen=True)
class Row:
    """Panels under one title."""

    title: str
    panels: tuple[Panel, ...]


NONE_IS_GOOD: Final = ((None, "green"), (1, "red"))
NONE_IS_BAD: Final = ((None, "red"), (1, "green"))


def stat(
    title: str, expr: str, description: str, steps: tuple[tuple[float | None, str], ...], words: Mapping[str, str] = {}
) -> Panel:
    """A number in a box that is green or red."""
    return Panel(title, (Query(expr, title),), description, "short", steps, words, width=4, height=4, is_stat=True)


def a_second(title: str, signal: str, description: str, legend: str = "{{service}}") -> Panel:
    """How many of them each second; one line for each service, or for what `legend` names besides."""
    return Panel(title, (Query(rate(signal, legend), legend),), description, "ops")


def a_minute(title: str, description: str, *signals: str, legend: str = "{{service}}") -> Panel:
    """How many of them each minute, for what happens seldom: one bar for each service and signal."""
    several = len(signals) > 1
    return Panel(
        title,
        tuple(
            Query(f"60 * {rate(signal, legend)}", f"{legend} {signal.replace('_', ' ')}" if several else legend)
            for signal in signals
        ),
        description,
        "cpm",
        bars=True,
    )


def rate(signal: str, legend: str = "{{service}}") -> str:
    """Counted each second, by the labels that a legend shows."""
    labels = ", ".join(part.partition("}}")[0] for part in legend.split("{{")[1:])
    return f"sum by ({labels}) (rate(idempotency_{signal}_total{CHOSEN}[$__rate_interval]))"


def percentile(share: float, histogram: str, labels: str, legend: str) -> Query:
    """The seconds within which so large a share was done."""
    counted = f"sum by (le, {labels}) (rate(idempotency_{histogram}_seconds_bucket{CHOSEN}[$__rate_interval]))"
    return Query(f"histogram_quantile({share}, {counted})", f"{legend} p{share * 100:g}")


LETTERS: Final = f"idempotency_dead_letters_total{CHOSEN}"

WELL: Final = Row(
    "Is it well?",
    (
        stat(
            "Workers that answer",
            'sum(up{job="integr8s-idem", instance=~"$instance"})',
            "Processes that Prometheus can scrape. None: nothing is handled. Look whether their pods run and what they "
            f"logged last. See IdempotencyWorkerUnreachable and IdempotencyNoWorker in {GUIDE}.",
            NONE_IS_BAD,
        ),
        stat(
            "Workers that do not",
            'count(up{job="integr8s-idem", instance=~"$instance"} == 0) or vector(0)',
            "Targets that Prometheus knows and cannot scrape. Their events are taken over within a lease; find out why "
            f"they do not answer. See IdempotencyWorkerUnreachable in {GUIDE}.",
            NONE_IS_GOOD,
        ),
        stat(
            "Store",
            f"min(idempotency_store_up{CHOSEN})",
            "Down: at least one worker gets no answer, has paused, and neither loses nor handles anything. Bring the "
            f"store back; the workers go on by themselves. See IdempotencyStoreDown in {GUIDE}.",
            NONE_IS_BAD,
            {"0": "DOWN", "1": "up"},
        ),
        stat(
            "Lag",
            f"sum(idempotency_consumer_lag{CHOSEN})",
            "Messages that wait to be settled, of all topics. If it grows: more workers, up to the number of "
            f"partitions, or a look at what is slow in the row Time. See IdempotencyConsumerLagGrows in {GUIDE}.",
            ((None, "green"), (1_000, "yellow"), (10_000, "red")),
        ),
        stat(
            "Dead letters in 1 h",
            f"round(sum((increase({LETTERS}[1h]) > 0) or ({LETTERS} > 0 unless {LETTERS} offset 1h)) or vector(0))",
            "Messages that were given up. None is lost: read why in their headers, mend it, replay them. "
            f"See IdempotencyDeadLetters in {GUIDE}.",
            NONE_IS_GOOD,
        ),
        stat(
            "Alerts",
            'count(ALERTS{alertname=~"Idempotency.*", alertstate="firing"}) or vector(0)',
            f"Alerts of deploy/prometheus/alerts.yml that fire now. Each has its section in {GUIDE}.",
            NONE_IS_GOOD,
        ),
    ),
)

FLOW: Final = Row(
    "Flow",
    (
        a_second(
            "Delivered",
            "deliveries",
            "Deliveries taken from Kafka, duplicates included. Zero while lag is above zero: the workers are stuck, "
            f"see IdempotencyNothingHandled in {GUIDE}.",
        ),
        a_second(
            "Handled",
            "events_handled",
            "Deliveries whose handler returned. Well below Delivered without duplicates: handlers fail, look at the "
            "row Trouble.",
            "{{service}} {{event_type}}",
        ),
        a_second(
            "Duplicates blocked",
            "duplicates_blocked",
            "Deliveries whose handler did not run, since the work was done. Much more than usual: a producer repeats "
            "itself, or offsets are not committed; look at Commits and rebalances.",
        ),
        Panel(
            "Known and new",
            (Query(rate("cache_hits"), "{{service}} known"), Query(rate("cache_misses"), "{{service}} new")),
            "What the store was asked for: work it knew, and work that was new to it. Known work rises with "
            "duplicates; that alone is no fault.",
            "ops",
        ),
        Panel(
            "Share that was known",
            (Query(f"{rate('cache_hits')} / ({rate('cache_hits')} + {rate('cache_misses')})"),),
            "How much of what comes is a duplicate. A jump: somebody replays a topic, or a producer sends everything "
            "twice. No line: nothing came.",
            "percentunit",
        ),
        a_second(
            "Published",
            "events_published",
            "Outgoing events that the broker has confirmed. Zero while events are handled that publish: look at "
            "Outbox and at the log for PublishError.",
            "{{service}} {{event_type}}",
        ),
    ),
)

TROUBLE: Final = Row(
    "Trouble",
    (
        a_minute(
            "Dead letters",
            "Messages given up, by reason. Read their headers with a console consumer, mend the cause, replay them: "
            f"docs/how-to/replay-a-dead-letter.md. See IdempotencyDeadLetters in {GUIDE}.",
            "dead_letters",
            legend="{{service}} {{reason}}",
        ),
        a_minute(
            "Failures and retries",
            "Runs of handlers that raised or took too long, and deliveries to be tried again. Rising: read the "
            f"tracebacks in the log; what keeps failing becomes a dead letter. See IdempotencyHandlersFail in {GUIDE}.",
            "handler_failures",
            "retries",
        ),
        a_minute(
            "Takeovers, prevented late starts, isolated runs",
            "Work taken over from a worker whose lease ended without a word, handlers that did not start on such a "
            "lease, and events that run alone since they may have crashed workers. A few when a worker is killed; a "
            f"steady rate means that workers die or stall again and again. See IdempotencyTakeovers in {GUIDE}.",
            "takeovers",
            "stale_starts_prevented",
            "isolated_runs",
        ),
        a_minute(
            "Lost reservations and late ends",
            "Runs whose reservation was gone before their end, and outcomes of partitions that had been given up. "
            "Raise processing_timeout_seconds or drain_timeout_seconds, or find what blocks the event loop. "
            f"See IdempotencyReservationsLost in {GUIDE}.",
            "reservations_lost",
            "stale_completions",
        ),
        a_minute(
            "Store errors",
            "Calls of the store without a usable answer; each was repeated or made the worker pause. Look at the "
            f"store's load and the network. See IdempotencyStoreErrors in {GUIDE}.",
            "store_errors",
        ),
        a_minute(
            "Store lost, failed over, started anew, records vanished",
            "Each may mean that the store forgot work, which then may be done twice. Look what happened to the "
            f"server, and make it durable: docs/how-to/prepare-redis.md. See IdempotencyStoreDataLost in {GUIDE}.",
            "store_data_losses",
            "store_failovers",
            "store_restarts",
            "records_vanished",
        ),
        a_minute(
            "Refused replays",
            "Messages with replay headers that were not signed, by reason, handled as if they had none; and replays "
            "for other groups, passed by. If nobody here replays, see who may publish to the topics: "
            "docs/how-to/replay-a-dead-letter.md.",
            "replays_refused",
            "replays_for_other_groups",
        ),
        a_minute(
            "Undecodable messages",
            "Messages that are no event known here, by reason; they went to the dead-letter topic as they came. A "
            "producer writes another format: compare its version with that of the service.",
            "undecodable_messages",
            legend="{{service}} {{reason}}",
        ),
        a_minute(
            "Unreadable records, reused keys",
            "Records in the store that cannot be read, and keys that came with another payload. Somebody else writes "
            "under our prefix, or a producer uses an id twice. "
            f"See IdempotencyCorruptRecords and IdempotencyKeysReused in {GUIDE}.",
            "corrupt_records",
            "keys_reused",
        ),
        a_minute(
            "Unguarded runs",
            "Handlers that ran without the guard, because on_store_error or on_key_reused lets them. Each may have "
            f"been a duplicate. See IdempotencyUnguardedRuns in {GUIDE}.",
            "unguarded_runs",
        ),
        a_minute(
            "Commits and rebalances",
            "Commits that failed, and changes of the assignment. A few at each deployment; a steady rate: workers "
            f"leave the group again and again, look at Event loop. See IdempotencyCommitsFail in {GUIDE}.",
            "commit_failures",
            "rebalances",
        ),
        a_minute(
            "Damaged partitions",
            "Partitions set aside because a batch in them cannot be read. It does not mend itself. "
            f"See IdempotencyPartitionDamaged in {GUIDE}.",
            "damaged_partitions",
        ),
        a_minute(
            "Waits, dropped results, orphaned steps",
            "Deliveries that waited for a run elsewhere; results too large to keep (raise max_result_size_bytes or "
            "return less); steps that a run has done and its last run did not ask for (a step was renamed while "
            "events were under way).",
            "waits",
            "results_dropped",
            "steps_orphaned",
        ),
    ),
)

TIME: Final = Row(
    "Time",
    (
        Panel(
            "One delivery",
            tuple(percentile(share, "processing", "service", "{{service}}") for share in (0.5, 0.95, 0.99)),
            "From decoding to the handler's end. If it is slow, the next panel says in which phase.",
            "s",
        ),
        Panel(
            "Phases, p95",
            (percentile(0.95, "phase", "service, phase", "{{service}} {{phase}}"),),
            "handle is your handler; reserve and complete are the store. A slow store: docs/explanation/speed.md says "
            "what to expect. wait is waiting for a run elsewhere.",
            "s",
        ),
        Panel(
            "Event loop",
            (
                Query(
                    f"max by (service, instance) (idempotency_event_loop_lag_seconds{CHOSEN})",
                    "{{service}} {{instance}}",
                ),
            ),
            "How late the event loop is. Near a second: a handler computes without await; move that to a thread or a "
            "process. Near a third of the session timeout workers leave the group. "
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
            (Query(f"sum by (service, topic) (idempotency_consumer_lag{CHOSEN})", "{{service}} {{topic}}"),),
            "Messages between the committed offset and the end. One topic alone: its handler is slow or one of its "
            f"partitions is damaged. See IdempotencyConsumerLagGrows in {GUIDE}.",
        ),
        Panel(
            "In flight",
            (Query(f"sum by (service) (idempotency_in_flight{CHOSEN})"),),
            "Deliveries taken and not settled. At max_in_flight fetching rests: that is as it should be. Stuck there "
            "with nothing handled: handlers hang, set handler_timeout_seconds.",
        ),
        Panel(
            "Keys active",
            # Every worker counts the same keys in the store: they are not to be added up.
            (Query(f"max by (service) (idempotency_keys_active{CHOSEN})"),),
            "Keys that hold a lease now, be it of a worker that has died. More than In flight, and it stays so: leases "
            "of the dead; they end after processing_timeout_seconds, and their work is taken over.",
        ),
        Panel(
            "Outbox",
            (Query(f"max by (service) (idempotency_outbox_waiting{CHOSEN})"),),
            "Events of committed transactions that wait to be published. It does not fall: Kafka refuses them or no "
            f"worker of the service runs. See IdempotencyOutboxStuck in {GUIDE}. No line: this store has no outbox.",
        ),
        a_second(
            "Result bytes",
            "result_bytes",
            "Bytes of results kept for duplicates. They fill the store: return less, or set enable_result_caching to "
            "false where nobody reads them.",
        ),
        a_second(
            "Records purged",
            "records_purged",
            "Expired records taken out of a store in SQL. Zero while its table grows: set purge_interval_seconds above "
            "0. Redis and DynamoDB expire by themselves.",
        ),
    ),
)

ROWS: Final = (WELL, FLOW, TROUBLE, TIME, STATE)
