"""Decode deliveries, verify replays, and publish dead letters.

A delivery is settled when each handler of its event has succeeded, had succeeded before, or is dead-lettered.  Until
then it is retried, waits for a concurrent duplicate, or waits for the store.  If its assignment closes, it is released
and will be redelivered.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

from msgspec import Struct

from integr8s_idem.codecs import header
from integr8s_idem.engine.error_text import describe_error
from integr8s_idem.engine.executor import Executor
from integr8s_idem.engine.work import Discarded, HandlerFailed, Outcome
from integr8s_idem.errors import (
    EventTooLargeError,
    PublishError,
    StoreError,
    UndecodableEventError,
)
from integr8s_idem.events import BaseEvent, EventDecoder
from integr8s_idem.handlers.dispatcher import EventDispatcher, HandlerExecution
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.telemetry import SILENT_PHASE, Observer, Signal, Span
from integr8s_idem.telemetry.log_fields import logging_with
from integr8s_idem.worker.assignments import AbandonedError, Delivery
from integr8s_idem.worker.backoff import Backoff
from integr8s_idem.worker.dead_letter_reasons import dead_letter_of, no_handler
from integr8s_idem.worker.dead_letters import UNVERIFIED_COPY, DeadLetter, DeadLetterMessage, is_replay
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
from integr8s_idem.worker.retries import Retries
from integr8s_idem.worker.retry_copies import UnverifiedCopyError
from integr8s_idem.worker.slots import Slots
from integr8s_idem.worker.store_circuit import StoreCircuit
from integr8s_idem.worker.tally import Tally

logger = logging.getLogger(__name__)

# Read once, because a member of an enumeration takes as long to read as two calls before Python 3.12.
_DELIVERED: Final = Signal.DELIVERED

DEAD_LETTER_BACKOFF = Backoff(initial=0.5, longest=10.0)
"""Delays between attempts to publish a dead letter."""


class Decoded(Struct, frozen=True, eq=False):
    """A decoded delivery: an execution for each handler of its event, or the dead letter that replaces them."""

    executions: Sequence[HandlerExecution] = ()
    dead_letter: DeadLetter | None = None
    processing: AbstractContextManager[Span] = SILENT_PHASE
    """Entered around its handling."""


@final
class UnverifiedReplay(Decoded, frozen=True, eq=False, kw_only=True):
    """A delivery whose replay headers are honored only if the store confirms that the work failed."""

    claim: ReplayClaim


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
    """Limit handlers that wait for something concurrently; deliveries that have not started hold none."""
    backoff: Backoff
    dead_letter_suffix: str
    observer: Observer
    replays: ReplayPolicy
    """Decides which replay headers are honored."""
    retries: Retries | None = None
    """Set if the service has retry topics."""
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
        if delivery.assignment.retry is not None and self.retries is not None:
            return self._decode_copy(delivery, self.retries)
        try:
            if is_replay(record):
                decision = self._judge(record)
                if decision.is_for_others:
                    return Decoded()
            event = self.decoder.decode(record.value, record.headers)
        except UndecodableEventError as error:
            return self._undecodable(record, error, decision.generation)
        delivery.event_type, delivery.event_id = event_type, event_id = event.event_type, event.event_id
        self.observer.count(_DELIVERED, event_type)
        processing = self.observer.processing(record, event_type, event_id)
        if decision is not NO_REPLAY:
            return self._decoded_replay(record, event, decision, processing)
        return self._decoded(event, decision, processing)

    def _undecodable(self, record: Record, error: UndecodableEventError, generation: int) -> Decoded:
        self.observer.count(_DELIVERED)
        self.observer.count(Signal.UNDECODABLE, reason=error.reason)
        dead_letter = DeadLetter(error.reason, error, generation=generation)
        stated_id = header(record.headers, "event_id") or ""
        return Decoded((), dead_letter, self.observer.processing(record, "", stated_id))

    def _decode_copy(self, delivery: Delivery, retries: Retries) -> Decoded:
        """Decode a message of a retry topic: only its handler runs, and earlier attempts count."""
        record = delivery.record
        try:
            copy = retries.copy_of(delivery)
            if copy is None:
                self.observer.count(_DELIVERED)
                return Decoded()
            event = self.decoder.decode(record.value, copy.origin.headers)
            copy.check(event.event_id)
        except UnverifiedCopyError as error:
            self.observer.count(_DELIVERED)
            return Decoded((), DeadLetter(UNVERIFIED_COPY, f"it is not a valid copy of an event: {error}"))
        except UndecodableEventError as error:
            return self._undecodable(record, error, 0)
        delivery.event_type, delivery.event_id = event_type, event_id = event.event_type, event.event_id
        self.observer.count(_DELIVERED, event_type)
        processing = self.observer.processing(record, event_type, event_id)
        decoded = self._decoded(event, ReplayDecision(copy.generation, copy.handler), processing)
        for execution in decoded.executions:
            if isinstance(execution, GuardedExecution):
                execution.work.copied_attempt = copy.attempt
                execution.work.uncounted_attempts = copy.aborted
        return decoded

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
            return Decoded((), no_handler(only, event, generation), processing)
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
        pause = self.backoff.pause_by(failed.rule, failed.attempt)
        self.note_retry(execution, failed, pause)
        return pause

    def note_retry(self, execution: HandlerExecution, failed: HandlerFailed, pause: float) -> None:
        """Count and log that a handler that failed is retried after `pause` seconds."""
        self.tally.retries += 1
        self.observer.count(Signal.RETRY, execution.event.event_type)
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
        dead_letter = dead_letter_of(execution, outcome)
        if dead_letter.event_id != delivery.event_id:
            # The handler has changed its event: a replay must name the one in the message.
            dead_letter = replace(dead_letter, event_id=delivery.event_id)
        await self.dead_letter(delivery, dead_letter)

    async def dead_letter(self, delivery: Delivery, dead_letter: DeadLetter) -> None:
        """Publish the message to the dead-letter topic, with retries until the broker has confirmed it."""
        with logging_with(dead_letter):
            await self._dead_letter(delivery, dead_letter)

    async def _dead_letter(self, delivery: Delivery, dead_letter: DeadLetter) -> None:
        record = delivery.source
        topic = delivery.source_topic + self.dead_letter_suffix
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
