"""Replay dead letters: decide which to publish, record why others are skipped, and publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from integr8s_idem.config import Settings
from integr8s_idem.errors import ApplicationError, EventTooLargeError, PublishError, UndecodableEventError
from integr8s_idem.keys import LAST_GENERATION
from integr8s_idem.operations.dead_letter_counts import Group, Tally
from integr8s_idem.operations.dead_letter_records import FoundRecord, RecordLookup
from integr8s_idem.operations.dead_letters import Place, StoredDeadLetter
from integr8s_idem.records import Corrupt, IdempotencyStatus
from integr8s_idem.worker import EventPublisher, Replay, replay_of

MAX_EXAMPLES: Final = 3
"""Number of places that a report lists for each reason."""


class ReplayStatus(str, Enum):
    """The result of replaying one dead letter."""

    PUBLISHED = "published"
    """Published as its next generation."""
    NOT_A_DEAD_LETTER = "not_a_dead_letter"
    INCOMPLETE = "incomplete"
    GENERATION_LIMIT = "generation_limit"
    BAD_GENERATION = "bad_generation"
    NO_DEAD_LETTER_TOPIC = "no_dead_letter_topic"
    NO_TOPIC = "no_topic"
    HANDLED = "handled"
    FAILED_AGAIN = "failed_again"
    IN_PROGRESS = "in_progress"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NOT_CONFIRMED = "not_confirmed"


SKIP_REASONS: Final = {
    ReplayStatus.NOT_A_DEAD_LETTER: "not written by this library: the headers do not name the original topic",
    ReplayStatus.INCOMPLETE: (
        "the message was too large to be dead-lettered whole: publish the original message as a new event"
    ),
    ReplayStatus.GENERATION_LIMIT: "already replayed the maximum number of times",
    ReplayStatus.BAD_GENERATION: ("the generation header is not a number: publish the original message as a new event"),
    ReplayStatus.NO_DEAD_LETTER_TOPIC: (
        "the name of the topic does not reveal the original topic: choose one with --to TOPIC"
    ),
    ReplayStatus.NO_TOPIC: "the original topic no longer exists",
    ReplayStatus.HANDLED: "already replayed and handled",
    ReplayStatus.FAILED_AGAIN: "already replayed and failed again: replay the dead letter of that generation instead",
    ReplayStatus.IN_PROGRESS: "already replayed and still in progress: check again later",
    ReplayStatus.UNREADABLE: "the record of the replay cannot be read: inspect the record and delete it",
    ReplayStatus.TOO_LARGE: "larger than the topic or [kafka] max_event_bytes allows",
    ReplayStatus.NOT_CONFIRMED: "not confirmed by the brokers: run the replay again",
}
"""Descriptions of the reasons for which dead letters are skipped."""

ALREADY_REPLAYED: Final = frozenset({
    ReplayStatus.HANDLED,
    ReplayStatus.FAILED_AGAIN,
    ReplayStatus.IN_PROGRESS,
    ReplayStatus.UNREADABLE,
})  # fmt: skip
"""Statuses known from the store.  Publishing such a dead letter again has no effect."""

_OF_STATUS: Final = {
    IdempotencyStatus.COMPLETED: ReplayStatus.HANDLED,
    IdempotencyStatus.FAILED: ReplayStatus.FAILED_AGAIN,
    IdempotencyStatus.PROCESSING: ReplayStatus.IN_PROGRESS,
}


class ReplayDecision(NamedTuple):
    """Whether to publish a dead letter; `replay` is the message to publish."""

    dead_letter: StoredDeadLetter
    status: ReplayStatus
    replay: Replay | None = None


def decide(
    dead_letter: StoredDeadLetter,
    record: FoundRecord,
    topics: Collection[str],
    settings: Settings | None = None,
    to: str | None = None,
) -> ReplayDecision:
    """Decide whether to publish `dead_letter`.

    Args:
        dead_letter: The dead letter.
        record: The record of its next generation, if there is one.
        topics: All topics of the cluster.
        settings: Settings of the services; their secret signs replays.
        to: Topic to publish to instead of the original topic.
    """
    try:
        replay = replay_of(dead_letter.record, settings, to=to)
    except UndecodableEventError:
        return ReplayDecision(dead_letter, ReplayStatus.BAD_GENERATION)
    except ApplicationError:
        return ReplayDecision(dead_letter, _why_not_replayable(dead_letter))
    if replay.topic not in topics:  # sending to a missing topic might create it
        return ReplayDecision(dead_letter, ReplayStatus.NO_TOPIC)
    if isinstance(record, Corrupt):
        return ReplayDecision(dead_letter, ReplayStatus.UNREADABLE)
    if record is not None:
        return ReplayDecision(dead_letter, _OF_STATUS[record.status])
    return ReplayDecision(dead_letter, ReplayStatus.PUBLISHED, replay)


def _why_not_replayable(dead_letter: StoredDeadLetter) -> ReplayStatus:
    if not dead_letter.topic:
        return ReplayStatus.NOT_A_DEAD_LETTER
    if "dropped" in dead_letter.fields:
        return ReplayStatus.INCOMPLETE
    if dead_letter.generation >= LAST_GENERATION:
        return ReplayStatus.GENERATION_LIMIT
    return ReplayStatus.NO_DEAD_LETTER_TOPIC


@dataclass
class Report:
    """The results of a replay so far."""

    groups: Tally = field(default_factory=Tally)
    """Published dead letters."""
    destinations: Counter[str] = field(default_factory=Counter)
    """Number of published messages by topic."""
    skipped: Counter[ReplayStatus] = field(default_factory=Counter)
    examples: dict[ReplayStatus, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Errors of topics that no longer accept messages."""
    unguarded: int = 0
    """Number of published dead letters without a record: earlier replays of these are unknown."""

    @property
    def published(self) -> int:
        return self.groups.total

    def add(self, dead_letter: StoredDeadLetter, status: ReplayStatus, topic: str = "") -> None:
        """Count one dead letter, published to `topic` or skipped."""
        if status is ReplayStatus.PUBLISHED:
            self.groups.add(Group.of(dead_letter))
            self.destinations[topic] += 1
            self.unguarded += not dead_letter.record_key
            return
        self.skipped[status] += 1
        places = self.examples.setdefault(status, [])
        if len(places) < MAX_EXAMPLES:
            places.append(str(dead_letter.place))

    def counts(self) -> dict[str, Any]:
        """Return the counts only, JSON-serializable."""
        skipped = {status.value: count for status, count in self.skipped.most_common()}
        return {"published": self.published, "destinations": dict(self.destinations), "skipped": skipped}

    def as_json(self) -> dict[str, Any]:
        """Return counts, groups, examples and errors, JSON-serializable."""
        return {
            **self.counts(),
            "groups": self.groups.as_json(),
            "examples": {status.value: places for status, places in self.examples.items()},
            "errors": self.errors,
        }


class Replayer:
    """Replays dead letters page by page.

    Args:
        topics: All topics of the cluster.
        records: Looks up the records of earlier replays.
        publisher: Publishes the messages; without a publisher, dead letters are only counted.
        report: Updated for each dead letter.
        settings: Settings of the services; their secret signs replays.
        to: Topic to publish to instead of the original topics.
    """

    def __init__(
        self,
        topics: Collection[str],
        records: RecordLookup,
        publisher: EventPublisher | None,
        report: Report,
        settings: Settings | None = None,
        to: str | None = None,
    ) -> None:
        self.report = report
        self._settings = settings
        self._to = to
        self._topics = topics
        self._records = records
        self._publisher = publisher

    async def replay(self, dead_letters: Sequence[StoredDeadLetter]) -> None:
        """Publish the `dead_letters` that can be replayed.  A single failure never fails the others."""
        records = await self._records.replay_records(dead_letters)
        decisions = [
            decide(dead_letter, record, self._topics, self._settings, self._to)
            for dead_letter, record in zip(dead_letters, records, strict=True)
        ]
        failures = await self._publish(decisions) if self._publisher else {}
        for dead_letter, status, replay in decisions:
            self.report.add(dead_letter, failures.get(dead_letter.place, status), replay.topic if replay else "")

    async def _publish(self, decisions: Sequence[ReplayDecision]) -> dict[Place, ReplayStatus]:
        """Publish and return the statuses of the dead letters that could not be published."""
        assert self._publisher is not None
        errors = self.report.errors
        failures: dict[Place, ReplayStatus] = {}
        sent: list[tuple[StoredDeadLetter, Replay]] = []
        for dead_letter, _, replay in decisions:
            if replay is None:
                continue
            if replay.topic in errors:
                failures[dead_letter.place] = ReplayStatus.NOT_CONFIRMED
            else:
                sent.append((dead_letter, replay))
        results = await self._publisher.send_all([replay for _, replay in sent])
        for (dead_letter, replay), error in zip(sent, results, strict=True):
            if isinstance(error, EventTooLargeError):
                failures[dead_letter.place] = ReplayStatus.TOO_LARGE
            elif isinstance(error, PublishError):
                failures[dead_letter.place] = ReplayStatus.NOT_CONFIRMED
                errors[replay.topic] = str(error)
        return failures
