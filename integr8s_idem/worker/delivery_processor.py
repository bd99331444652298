"""Decode deliveries, verify replays, and publish dead letters.

A delivery is settled when each handler of its event has succeeded, had succeeded before, or is dead-lettered.  Until
then it is retried, waits for a concurrent duplicate, or waits for the store.  If its assignment closes, it is released
and will be redelivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from integr8s_idem.codecs import header
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.outcomes import error_of
from integr8s_idem.engine.work import Discarded, HandlerFailed, Outcome
from integr8s_idem.errors import (
    EventTooLargeError,
    OutcomeUnknownError,
    PublishError,
    StoreError,
    UndecodableEventError,
)
from integr8s_idem.events import BaseEvent, EventDecoder
from integr8s_idem.handlers.dispatcher import EventDispatcher, HandlerExecution
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.records import Corrupt, Failed, KeyReused
from integr8s_idem.telemetry import SILENT, Observer, Phase, Signal, Span
from integr8s_idem.telemetry.log_fields import logging_with
from integr8s_idem.worker.assignments import AbandonedError, Delivery
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.dead_letters import DeadLetter, DeadLetterMessage, is_replay
from integr8s_idem.worker.isolation_gate import IsolationGate
from integr8s_idem.worker.kafka_protocols import Record
from integr8s_idem.worker.poison_events import PoisonEventRunner
from integr8s_idem.worker.publisher import EventPublisher, describe_placement
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

DEAD_LETTER_BACKOFF = Backoff(initial=0.5, longest=10.0)
"""Delays between attempts to publish a dead letter."""


@dataclass(slots=True)
class Tally:
    """Counts since the start of a worker."""

    handled: int = 0
    reruns: int = 0
    """Handled at the second or a later attempt."""
    reconciled: int = 0
    """Handled without a run, because a reconcile function found the effect of an earlier attempt."""
    duplicates: int = 0
    """Not handled, since an earlier run had completed."""
    waits: int = 0
    retries: int = 0
    dead_letters: int = 0
    discarded: int = 0
    """Settled although their handlers failed, by a rule."""
    leases_lost: int = 0
    stale: int = 0
    """Settled after the partition was revoked, so not committed by this worker."""


_NO_SPAN: Final = SILENT.phase(Phase.HANDLE)


@dataclass(slots=True, eq=False)
class Decoded:
    """A decoded delivery: an execution for each handler of its event, or the dead letter that replaces them."""

    executions: Sequence[HandlerExecution] = ()
    dead_letter: DeadLetter | None = None
    processing: AbstractContextManager[Span] = _NO_SPAN
    """Entered around its handling."""


@dataclass(slots=True, eq=False)
class UnverifiedReplay(Decoded):
    """A delivery whose replay headers are honored only if the store confirms that the work failed."""

    claim: ReplayClaim = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class DeliveryProcessor:
    """Decodes and dead-letters the deliveries of one service."""

    service: str
    group: str
    dispatcher: EventDispatcher
    decoder: EventDecoder
    publisher: EventPublisher
    circuit: StoreCircuit
    slots: Slots
    """Limit handlers that run concurrently; waiting deliveries hold none."""
    backoff: Backoff
    dead_letter_suffix: str
    observer: Observer
    replays: ReplayPolicy
    """Decides which replay headers are honored."""
    isolation: IsolationGate = field(default_factory=IsolationGate)
    """Shared by all services of the process."""
    suspects: PoisonEventRunner | None = None
    """Runs events that may have crashed workers alone; `None` to run them with the others."""
    tally: Tally = field(default_factory=Tally)
    _topic_locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """One for each dead-letter topic, so that a missing topic does not block dead letters to other topics."""
    _reporter: ReplayReporter = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reporter", ReplayReporter(self.service, self.observer))

    def decode(self, delivery: Delivery) -> Decoded:
        """Decode `delivery`, and find its handlers and their keys."""
        record, decision = delivery.record, NO_REPLAY
        try:
            if is_replay(record):
                decision = self._judge(record)
                if decision.is_for_others:
                    return Decoded()
            event = self.decoder.decode(record.value, record.headers)
        except UndecodableEventError as error:
            self.observer.count(Signal.DELIVERED)
            self.observer.count(Signal.UNDECODABLE, reason=error.reason)
            dead_letter = DeadLetter(error.reason, error, generation=decision.generation)
            stated_id = header(record.headers, "event_id") or ""
            return Decoded((), dead_letter, self.observer.processing(record, "", stated_id))
        delivery.event_type = event.event_type
        self.observer.count(Signal.DELIVERED, event.event_type)
        processing = self.observer.processing(record, event.event_type, event.event_id)
        if decision is not NO_REPLAY:
            return self._decoded_replay(record, event, decision, processing)
        return self._decoded(event, decision, processing)

    def _judge(self, record: Record) -> ReplayDecision:
        decision = self.replays.judge(record)
        if decision.is_for_others:
            self._reporter.for_others(record)
        elif decision.refused:
            self._reporter.refused(record, decision.refused)
        return decision

    def _decoded_replay(
        self, record: Record, event: BaseEvent, decision: ReplayDecision, processing: AbstractContextManager[Span]
    ) -> Decoded:
        if not decision.fits(event.event_id):
            decision = OTHER_EVENT
            self._reporter.refused(record, decision.refused)
        decoded = self._decoded(event, decision, processing)
        if decision.unproven is None or decoded.dead_letter is not None:
            return decoded
        return UnverifiedReplay(decoded.executions, None, processing, claim=decision.unproven)

    def _decoded(self, event: BaseEvent, decision: ReplayDecision, processing: AbstractContextManager[Span]) -> Decoded:
        generation, only = decision.generation, decision.only
        try:
            executions = self.dispatcher.executions(event, generation, only)
        except Exception as error:  # noqa: BLE001  # a key function is the user's code: the dead letter has its error
            dead_letter = DeadLetter(
                "no_key", error, generation=generation, event_type=event.event_type, event_id=event.event_id
            )
            return Decoded((), dead_letter, processing)
        if only is not None and not executions:
            return Decoded((), _no_handler(only, event, generation), processing)
        if self.suspects is not None:
            for execution in executions:
                if isinstance(execution, GuardedExecution):
                    execution.isolate()
        return Decoded(executions, None, processing)

    async def verified(self, delivery: Delivery, replay: UnverifiedReplay) -> Sequence[HandlerExecution]:
        """Return the executions of `replay`, with the claimed generation for each handler whose work had failed.

        Raises:
            AbandonedError: Its assignment is closing.
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
        """Return the execution of `first` in `generation`, or `None` if the store does not confirm the failure."""
        while True:
            await self._wait_for_store(delivery)
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
        """The executor of the manager that guards the handlers."""
        manager = self.dispatcher.manager
        assert manager is not None, "the handlers are guarded"
        return manager.executor

    async def _wait_for_store(self, delivery: Delivery) -> None:
        await self.circuit.wait(unless=delivery.assignment.closing)
        if delivery.assignment.closed:
            raise AbandonedError

    def retry_pause(self, execution: HandlerExecution, failed: HandlerFailed) -> float:
        """Return the seconds to wait before a handler that failed is retried, and log them."""
        self.tally.retries += 1
        self.observer.count(Signal.RETRY, execution.event.event_type)
        pause = self.backoff.pause_by(failed.rule, failed.attempt)
        with logging_with(attempt=failed.attempt):
            logger.warning(
                "%s: handler %s failed at attempt %d (%s), retrying in %.1f s",
                execution.label,
                execution.handler.name,
                failed.attempt,
                describe_error(failed.error),
                pause,
                exc_info=failed.error if logger.isEnabledFor(logging.DEBUG) else None,
            )
        return pause

    def note_discarded(self, execution: HandlerExecution, discarded: Discarded) -> None:
        """Count and log that an event was discarded."""
        self.tally.discarded += 1
        self.observer.count(Signal.DISCARDED, execution.event.event_type)
        with logging_with(attempt=discarded.attempt):
            logger.warning(
                "%s: handler %s failed at attempt %d (%s), discarded by a rule",
                execution.label,
                execution.handler.name,
                discarded.attempt,
                describe_error(discarded.error),
                exc_info=discarded.error if logger.isEnabledFor(logging.DEBUG) else None,
            )

    async def dead_letter_outcome(self, delivery: Delivery, execution: HandlerExecution, outcome: Outcome[Any]) -> None:
        """Publish the message to the dead-letter topic because of the outcome of `execution`."""
        await self.dead_letter(delivery, _dead_letter(execution, outcome))

    async def dead_letter(self, delivery: Delivery, dead_letter: DeadLetter) -> None:
        """Publish the message to the dead-letter topic, with retries until the broker has confirmed it."""
        with logging_with(dead_letter):
            await self._dead_letter(delivery, dead_letter)

    async def _dead_letter(self, delivery: Delivery, dead_letter: DeadLetter) -> None:
        record = delivery.record
        topic = record.topic + self.dead_letter_suffix
        message, tries = DeadLetterMessage(dead_letter, record, self.service, self.group), 0
        while True:
            try:
                # One at a time: a broker refuses a whole batch, so that messages that fit would be shortened as well.
                async with self._topic_locks[topic]:
                    with self.observer.sending(topic, dead_letter.event_id, record.headers, in_current=True) as span:
                        placement = await self.publisher.send(topic, message.key, message.value, message.headers)
                        describe_placement(span, placement)
                break
            except (PublishError, EventTooLargeError) as error:
                if isinstance(error, EventTooLargeError) and message.drop_part():
                    continue
                tries += 1
                logger.error("cannot publish to dead-letter topic %s, waiting: %s", topic, error)
                pause = DEAD_LETTER_BACKOFF.pause(tries)
                await asyncio.wait({delivery.assignment.closing}, timeout=pause)
                if delivery.assignment.closed:
                    raise AbandonedError from error
        cause = dead_letter.error
        self.tally.dead_letters += 1
        self.observer.count(Signal.DEAD_LETTER, dead_letter.event_type, reason=dead_letter.reason)
        delivery.note_dead_letter(dead_letter.reason, cause, dead_letter.attempts)
        logger.error(
            "dead-lettered %s[%d]@%d to %s: %s",
            record.topic,
            record.partition,
            record.offset,
            topic,
            describe_error(cause) if isinstance(cause, BaseException) else cause,
            # After attempts of a handler, the traceback shows where it failed.
            exc_info=cause if dead_letter.attempts and isinstance(cause, BaseException) else None,
        )


def _no_handler(handler: str, event: BaseEvent, generation: int) -> DeadLetter:
    error = f"it is a replay for handler {handler!r}, but {event.event_type} has no handler with that name"
    return DeadLetter(
        "no_handler", error, handler, generation=generation, event_type=event.event_type, event_id=event.event_id
    )


_REASONS: Final[Mapping[type[Outcome[Any]], str]] = {
    HandlerFailed: "handler_failed",
    Failed: "previously_failed",
    KeyReused: "key_reused",
    Corrupt: "corrupt_record",
}
"""Why an outcome is dead-lettered."""


def _dead_letter(execution: HandlerExecution, outcome: Outcome[Any]) -> DeadLetter:
    error = error_of(execution.label, outcome)
    assert error is not None, f"{outcome} is not a reason for a dead letter"
    attempts = outcome.attempt if isinstance(outcome, HandlerFailed | Failed) else 0
    is_unknown = isinstance(outcome, HandlerFailed) and isinstance(error, OutcomeUnknownError)
    return DeadLetter(
        "outcome_unknown" if is_unknown else _REASONS[type(outcome)],
        error,
        execution.handler.name,
        execution.label,
        execution.record_key,
        attempts,
        execution.generation,
        execution.event.event_type,
        execution.event.event_id,
    )
