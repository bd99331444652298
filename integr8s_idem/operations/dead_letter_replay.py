"""Dead letters put back: what is to be published, what is left out and why, and doing it."""

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
from integr8s_idem.operations.dead_letter_records import DeadLetterRecords, Known
from integr8s_idem.operations.dead_letters import Letter
from integr8s_idem.records import Corrupt, IdempotencyStatus
from integr8s_idem.worker import EventPublisher, Replay, replay_of

EXAMPLES: Final = 3
"""Places that are shown for each reason why letters are left out."""


class Fate(str, Enum):
    """What becomes of a letter in a replay."""

    PUBLISHED = "published"
    """As its next generation."""
    NO_LETTER = "no_letter"
    NOT_WHOLE = "not_whole"
    TOO_OFTEN = "too_often"
    BAD_GENERATION = "bad_generation"
    NO_DEAD_LETTER_TOPIC = "no_dead_letter_topic"
    NO_TOPIC = "no_topic"
    HANDLED = "handled"
    FAILED_AGAIN = "failed_again"
    UNDER_WAY = "under_way"
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NOT_CONFIRMED = "not_confirmed"


TOLD: Final = {
    Fate.NO_LETTER: "no dead letters of this library: they do not say where they came from",
    Fate.NOT_WHOLE: "not the whole message, which was too large for a letter: publish that anew",
    Fate.TOO_OFTEN: "replayed as often as can be counted",
    Fate.BAD_GENERATION: "their generation is no number: publish the message anew",
    Fate.NO_DEAD_LETTER_TOPIC: "in a topic whose name does not say where they came from: publish them with --to TOPIC",
    Fate.NO_TOPIC: "the topic they came from is not there any more",
    Fate.HANDLED: "replayed and handled already",
    Fate.FAILED_AGAIN: "replayed already, and given up again: the letter of that generation is the one to replay",
    Fate.UNDER_WAY: "replayed already, and not done yet: look again later",
    Fate.UNREADABLE: "the record of their replay cannot be read: look at it, and delete it",
    Fate.TOO_LARGE: "larger than their topic, or [kafka] max_event_bytes, takes",
    Fate.NOT_CONFIRMED: "not confirmed by the brokers: replay them again",
}
"""Why letters are left out, in words."""

KNOWN_ALREADY: Final = frozenset({Fate.HANDLED, Fate.FAILED_AGAIN, Fate.UNDER_WAY, Fate.UNREADABLE})
"""What the store has told: published all the same, such a letter changes nothing."""

_OF_STATUS: Final = {
    IdempotencyStatus.COMPLETED: Fate.HANDLED,
    IdempotencyStatus.FAILED: Fate.FAILED_AGAIN,
    IdempotencyStatus.PROCESSING: Fate.UNDER_WAY,
}


class Decision(NamedTuple):
    """What is to become of a letter; `replay` if it is to be published."""

    letter: Letter
    fate: Fate
    replay: Replay | None = None


def decided(
    letter: Letter, known: Known, topics: Collection[str], settings: Settings | None = None, to: str | None = None
) -> Decision:
    """What is to become of `letter`.

    Args:
        letter: It.
        known: The record of its next generation, if there is one.
        topics: All there are.
        settings: Of the services, whose secret signs replays.
        to: The topic to publish to, if it is not the one that the letter's topic is named after.
    """
    try:
        replay = replay_of(letter.record, settings, to=to)
    except UndecodableEventError:
        return Decision(letter, Fate.BAD_GENERATION)
    except ApplicationError:
        if not letter.topic:
            return Decision(letter, Fate.NO_LETTER)
        if "dropped" in letter.told:
            return Decision(letter, Fate.NOT_WHOLE)
        return Decision(letter, Fate.TOO_OFTEN if letter.generation >= LAST_GENERATION else Fate.NO_DEAD_LETTER_TOPIC)
    if replay.topic not in topics:  # to send there might make it
        return Decision(letter, Fate.NO_TOPIC)
    if isinstance(known, Corrupt):
        return Decision(letter, Fate.UNREADABLE)
    if known is not None:
        return Decision(letter, _OF_STATUS[known.status])
    return Decision(letter, Fate.PUBLISHED, replay)


@dataclass
class Report:
    """What a replay comes to, or has come to so far."""

    groups: Tally = field(default_factory=Tally)
    """Letters that are published."""
    destinations: Counter[str] = field(default_factory=Counter)
    """Where they are published to."""
    left_out: Counter[Fate] = field(default_factory=Counter)
    examples: dict[Fate, list[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    """Of topics that have taken nothing any more."""
    unguarded: int = 0
    """Of those that are published, how many name no record: nothing tells whether they were replayed before."""

    @property
    def published(self) -> int:
        return self.groups.total

    def note(self, letter: Letter, fate: Fate, topic: str = "") -> None:
        """Count one letter; `topic`: where it is published to."""
        if fate is Fate.PUBLISHED:
            self.groups.add(Group.of(letter))
            self.destinations[topic] += 1
            self.unguarded += not letter.record_key
            return
        self.left_out[fate] += 1
        places = self.examples.setdefault(fate, [])
        if len(places) < EXAMPLES:
            places.append(str(letter.place))

    def counts(self) -> dict[str, Any]:
        """Numbers only, fit for JSON."""
        left_out = {fate.value: count for fate, count in self.left_out.most_common()}
        return {"published": self.published, "destinations": dict(self.destinations), "left_out": left_out}

    def as_json(self) -> dict[str, Any]:
        """Counts, groups and reasons."""
        return {
            **self.counts(),
            "groups": self.groups.as_json(),
            "examples": {fate.value: places for fate, places in self.examples.items()},
            "errors": self.errors,
        }


class Replayer:
    """Takes letters page by page.

    Args:
        topics: All there are.
        records: What the store knows.
        publisher: Who publishes; without one, letters are counted only.
        report: What is kept up to date.
        settings: Of the services, whose secret signs replays.
        to: The topic to publish to, if it is not the one that a letter's topic is named after.
    """

    def __init__(
        self,
        topics: Collection[str],
        records: DeadLetterRecords,
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

    async def take(self, letters: Sequence[Letter]) -> None:
        """Decide about `letters`, and publish what is to be published.  Never fails for one of them."""
        known = await self._records.of_replays(letters)
        pairs = zip(letters, known, strict=True)
        decisions = [decided(letter, record, self._topics, self._settings, self._to) for letter, record in pairs]
        fates = await self._published(decisions) if self._publisher else {}
        for letter, fate, replay in decisions:
            self.report.note(letter, fates.get(letter.place, fate), replay.topic if replay else "")

    async def _published(self, decisions: Sequence[Decision]) -> dict[Any, Fate]:
        """What has become of those that could not be published."""
        assert self._publisher is not None
        sent = [(one.letter, one.replay) for one in decisions if one.replay is not None]
        errors = self.report.errors
        fates = {letter.place: Fate.NOT_CONFIRMED for letter, replay in sent if replay.topic in errors}
        sent = [(letter, replay) for letter, replay in sent if replay.topic not in errors]
        for (letter, replay), error in zip(sent, await self._publisher.send_all([one for _, one in sent]), strict=True):
            if isinstance(error, EventTooLargeError):
                fates[letter.place] = Fate.TOO_LARGE
            elif isinstance(error, PublishError):
                fates[letter.place] = Fate.NOT_CONFIRMED
                errors[replay.topic] = str(error)
        return fates
