"""From a message to the point where its offset may move.

A delivery is settled when every handler of its event has come to an end that will not be taken back:
handled now, handled before, or dead-lettered.  Until then it is tried again, waits for a twin, or waits
for the store; a closing assignment lets it go, to come again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.store_client import describe_error
from integr8s_idem.engine.work import HandlerFailed, Outcome
from integr8s_idem.errors import (
    EventTooLargeError,
    PublishError,
    StoreError,
    UndecodableEventError,
)
from integr8s_idem.events import BaseEvent, EventDecoder
from integr8s_idem.handlers.dispatcher import EventDispatcher, HandlerExecution
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.records import Corrupt, Failed, KeyReused
from integr8s_idem.telemetry import SILENT, Observer, Signal, Span
from integr8s_idem.worker.assignments import AbandonedError, Delivery
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.dead_letters import DeadLetter, DeadLetterMessage, is_replay
from integr8s_idem.worker.isolation_gate import IsolationGate
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.poison_events import PoisonEventRunner
from integr8s_idem.worker.publisher import EventPublisher
from integr8s_idem.worker.replay_policy import (
    NO_REPLAY,
    OTHER_EVENT,
    ReplayDecision,
    ReplayPolicy,
    ReplayReporter,
    asks_for,
    follows_a_failure,
)
from integr8s_idem.worker.replay_signatures import ReplayClaim
from integr8s_idem.worker.slots import Slots
from integr8s_idem.worker.store_circuit import StoreCircuit

logger = logging.getLogger(__name__)

LONGEST_BODY_PAUSE = Backoff(initial=0.5, longest=10.0)
"""Pauses while the dead-letter topic takes nothing."""


@dataclass(slots=True)
class Tally:
    """What a worker has done since it started."""

    handled: int = 0
    reruns: int = 0
    """Handled at attempt 2 or later."""
    duplicates: int = 0
    """Answered by an earlier run's record."""
    waits: int = 0
    retries: int = 0
    dead_letters: int = 0
    leases_lost: int = 0
    stale: int = 0
    """Settled after the partition was gone: not committed by us."""


_UNSEEN: Final = SILENT.processing("", "", ())


@dataclass(slots=True, eq=False)
class Decoded:
    """What a delivery holds: an execution for each handler of its event, or why there are none."""

    executions: Sequence[HandlerExecution] = ()
    letter: DeadLetter | None = None
    processing: AbstractContextManager[Span] = _UNSEEN
    """To be entered around its handling."""


@dataclass(slots=True, eq=False)
class UnverifiedReplay(Decoded):
    """One whose replay headers count only if the store says that they replay failed work."""

    claim: ReplayClaim = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class DeliveryProcessor:
    """Settles the deliveries of one service."""

    service: str
    group: str
    dispatcher: EventDispatcher
    decoder: EventDecoder
    publisher: EventPublisher
    circuit: StoreCircuit
    slots: Slots
    """Handlers running at once.  Waiting deliveries hold none."""
    backoff: Backoff
    dead_letter_suffix: str
    observer: Observer
    replays: ReplayPolicy
    """Whose replay headers are honored."""
    isolation: IsolationGate = field(default_factory=IsolationGate)
    """Shared by all services of the process."""
    suspects: PoisonEventRunner | None = None
    """Runs events alone that may have crashed workers; `None` to run all side by side."""
    tally: Tally = field(default_factory=Tally)
    _letters: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """One for each dead-letter topic: a topic that is missing holds up no letters to others."""
    _reporter: ReplayReporter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reporter", ReplayReporter(self.service, self.observer))

    def decode(self, delivery: Delivery) -> Decoded:
        """Decode `delivery`, and find its handlers and their keys."""
        record, judgement = delivery.record, NO_REPLAY
        try:
            if is_replay(record):
                judgement = self._judge(record)
                if judgement.is_for_others:
                    return Decoded()
            event = self.decoder.decode(record.value, record.headers)
        except UndecodableEventError as error:
            self.observer.count(Signal.UNDECODABLE, reason=error.reason)
            return Decoded(letter=DeadLetter(error.reason, error, generation=judgement.generation))
        self.observer.count(Signal.DELIVERED, event.event_type)
        processing = self.observer.processing(event.event_type, record.topic, record.headers)
        if judgement is not NO_REPLAY:
            return self._decoded_replay(record, event, judgement, processing)
        return self._decoded(event, judgement, processing)

    def _judge(self, record: Record) -> ReplayDecision:
        judgement = self.replays.judge(record)
        if judgement.is_for_others:
            self._reporter.for_others(record)
        elif judgement.refused:
            self._reporter.refused(record, judgement.refused)
        return judgement

    def _decoded_replay(
        self, record: Record, event: BaseEvent, judgement: ReplayDecision, processing: AbstractContextManager[Span]
    ) -> Decoded:
        if not judgement.fits(event.event_id):
            judgement = OTHER_EVENT
            self._reporter.refused(record, judgement.refused)
        decoded = self._decoded(event, judgement, processing)
        if judgement.unproven is None or decoded.letter is not None:
            return decoded
        return UnverifiedReplay(decoded.executions, None, processing, claim=judgement.unproven)

    def _decoded(
        self, event: BaseEvent, judgement: ReplayDecision, processing: AbstractContextManager[Span]
    ) -> Decoded:
        generation, only = judgement.generation, judgement.only
        try:
            executions = self.dispatcher.executions(event, generation, only)
        except Exception as error:  # noqa: BLE001  # a key function is the user's code: its error goes with the letter
            letter = DeadLetter(
                "no_key", error, generation=generation, event_type=event.event_type, event_id=event.event_id
            )
            return Decoded((), letter, processing)
        if only is not None and not executions:
            return Decoded((), _nobody(only, event, generation), processing)
        if self.suspects is not None:
            for execution in executions:
                if isinstance(execution, GuardedExecution):
                    execution.isolate()
        return Decoded(executions, None, processing)

    async def verified(self, delivery: Delivery, replay: UnverifiedReplay) -> Sequence[HandlerExecution]:
        """The executions of `replay`, those that replay failed work in the generation that it claims.

        Raises:
            AbandonedError: Its assignment is closing; it will be redelivered.
        """
        generation, executions = replay.claim.generation, list[HandlerExecution]()
        for first in replay.executions:
            replayed = None
            if isinstance(first, GuardedExecution) and asks_for(replay.claim, first):
                replayed = await self._replayed(delivery, first, generation)
            executions.append(replayed or first)
        if all(execution.generation == 0 for execution in executions):
            self._reporter.refused(delivery.record, "not_failed")
        return executions

    async def _replayed(self, delivery: Delivery, first: GuardedExecution, generation: int) -> HandlerExecution | None:
        """`first` in its later `generation`; `None` if that is not known to replay failed work."""
        while True:
            await self._may_go_on(delivery)
            try:
                if not await follows_a_failure(first, generation):
                    return None
                break
            except StoreError as error:
                self.circuit.mark_unavailable(error)
        replayed = first.handler.execution(first.event, generation)
        if self.suspects is not None:
            replayed.isolate()
        return replayed

    @property
    def executor(self) -> Executor:
        """That of the manager which guards the handlers."""
        manager = self.dispatcher.manager
        assert manager is not None, "the handlers are guarded"
        return manager.executor

    def handled(self, attempt: int) -> None:
        """A handler has done its work, and that is remembered."""
        self.tally.handled += 1
        self.tally.reruns += attempt > 1

    async def _may_go_on(self, delivery: Delivery) -> None:
        await self.circuit.wait(unless=delivery.assignment.closing)
        if delivery.assignment.closed:
            raise AbandonedError

    def retry_pause(self, execution: HandlerExecution, failed: HandlerFailed) -> float:
        """Seconds to wait before a handler that failed is tried again; says so."""
        self.tally.retries += 1
        self.observer.count(Signal.RETRY, execution.event.event_type)
        pause = self.backoff.pause(failed.attempt)
        logger.warning(
            "%s: handler %s failed at attempt %d (%s), next try in %.1f s",
            execution.label,
            execution.handler.name,
            failed.attempt,
            describe_error(failed.error),
            pause,
            exc_info=failed.error if logger.isEnabledFor(logging.DEBUG) else None,
        )
        return pause

    async def dead_letter_outcome(self, delivery: Delivery, execution: HandlerExecution, outcome: Outcome[Any]) -> None:
        """Hand the message to the dead-letter topic, because of what came of `execution`."""
        await self.dead_letter(delivery, _letter(execution, outcome))

    async def _pause(self, delivery: Delivery, seconds: float) -> None:
        """Wait, holding no slot; a closing assignment cuts it short."""
        await asyncio.wait({delivery.assignment.closing}, timeout=seconds)

    async def dead_letter(self, delivery: Delivery, letter: DeadLetter) -> None:
        """Hand the message to the dead-letter topic.  Until that has it, the message is not settled."""
        record = delivery.record
        topic = record.topic + self.dead_letter_suffix
        parcel, tries = DeadLetterMessage(letter, record, self.service, self.group), 0
        while True:
            try:
                # One at a time: a broker refuses all that share a batch, and those that fit would be cut as well.
                async with self._letters[topic]:
                    await self.publisher.send(topic, parcel.key, parcel.value, parcel.headers)
                break
            except (PublishError, EventTooLargeError) as error:
                if isinstance(error, EventTooLargeError) and parcel.shed():
                    continue
                tries += 1
                logger.error("dead-letter topic %s takes nothing, waiting: %s", topic, error)  # no bug of ours
                await self._pause(delivery, LONGEST_BODY_PAUSE.pause(tries))
                if delivery.assignment.closed:
                    raise AbandonedError from error
        self.tally.dead_letters += 1
        self.observer.count(Signal.DEAD_LETTER, letter.event_type, reason=letter.reason)
        logger.error(
            "dead-lettered %s[%d]@%d to %s: %s",
            record.topic,
            record.partition,
            record.offset,
            topic,
            describe_error(letter.error) if isinstance(letter.error, BaseException) else letter.error,
            # Given up after tries: where it happened is what somebody will want to know.
            exc_info=letter.error if letter.attempts and isinstance(letter.error, BaseException) else None,
        )


def _nobody(handler: str, event: BaseEvent, generation: int) -> DeadLetter:
    told = f"it is a replay for handler {handler!r}, and no handler of {event.event_type} has that name"
    return DeadLetter(
        "no_handler", told, handler, generation=generation, event_type=event.event_type, event_id=event.event_id
    )


_REASONS: Final[Mapping[type[Outcome[Any]], str]] = {
    HandlerFailed: "handler_failed",
    Failed: "previously_failed",
    KeyReused: "key_reused",
    Corrupt: "corrupt_record",
}
"""Why an outcome is dead-lettered."""


def _letter(execution: HandlerExecution, outcome: Outcome[Any]) -> DeadLetter:
    error = error_of(execution.label, outcome)
    assert error is not None, f"{outcome} is no reason for a dead letter"
    attempts = outcome.attempt if isinstance(outcome, HandlerFailed | Failed) else 0
    return DeadLetter(
        _REASONS[type(outcome)],
        error,
        execution.handler.name,
        execution.label,
        execution.record_key,
        attempts,
        execution.generation,
        execution.event.event_type,
        execution.event.event_id,
    )
