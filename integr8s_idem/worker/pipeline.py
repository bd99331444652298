"""Deliveries on their way through the service, many at a time.

    put ─► ready ─► a wave: decoded, reserved in one round trip ─► held ─► hands: handled ─► remembered, in another
                        │                                                       │
                        └─► whatever is unusual: a task of its own, by Settler ◄┘

A wave is what is ready when there are free slots; while one waits for the store, the next is decoded.  Handlers run
in a few tasks, the hands: one goes on from delivery to delivery, and another joins it only where a handler waits for
something.  An event that fails, is in progress elsewhere, has several handlers or is traced takes the way of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from integr8s_idem._util.loop_fairness import pace_of
from integr8s_idem.engine.run import Returned, Run, RunOptions
from integr8s_idem.engine.work import Executed, NotStarted, Outcome
from integr8s_idem.errors import StoreError
from integr8s_idem.handlers.handler import GuardedExecution, HandlerExecution
from integr8s_idem.records import Completed, KeyReused, Reserved, Verdict
from integr8s_idem.worker.assignments import AbandonedError, Delivery
from integr8s_idem.worker.delivery_processor import Decoded, DeliveryProcessor
from integr8s_idem.worker.lanes import Lanes, Ordering
from integr8s_idem.worker.poison_events import FirstOutcome
from integr8s_idem.worker.task_contexts import in_context

logger = logging.getLogger(__name__)

MOST_TOGETHER: Final = 250
"""Deliveries of one wave: a few milliseconds of decoding, and of the store's time."""

MOST_WAVES: Final = 2
"""Waves under way: while the store answers one, the next is decoded."""

TURN: Final = 50
"""Deliveries that one hand does before it lets the event loop look at everything else."""


@dataclass(slots=True, eq=False)
class ReservedDelivery:
    """A delivery that is to be handled now."""

    delivery: Delivery
    met: Decoded
    handling: HandlerExecution
    run: Run | None
    """`None` for one that is not guarded."""

    def is_late(self) -> bool:
        """Whether too little of its lease is left to start its handler."""
        return self.run is not None and self.run.is_late()

    def release(self) -> None:
        """It is not handled after all."""
        if self.run is not None:
            self.run.release()


@dataclass(slots=True, eq=False)
class CompletedDelivery:
    """A delivery that was handled, and is to be remembered."""

    delivery: Delivery
    handling: GuardedExecution
    returned: Returned[Any]


class Pipeline:
    """Settles deliveries, and tells when each has come to its end."""

    def __init__(
        self,
        settler: DeliveryProcessor,
        ordering: Ordering,
        *,
        finish: Callable[[Delivery], None],
        let_go: Callable[[Delivery], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            finish: Told of a delivery that may be acknowledged.
            let_go: Told of each delivery that has left us, also of those that come again.
            fail: Told of a bug of ours: better a stopped service than a lost event.
        """
        self._settler = settler
        self._options = RunOptions(settler.gate.wait_out)
        self._slots = settler.slots
        self._isolation = settler.isolation
        self._isolation.when_opened.append(self._resume)
        self._slots.when_free = self._stir
        self._lanes = Lanes(ordering)
        self._finish = finish
        self._let_go = let_go
        self._fail = fail
        self._ready: deque[Delivery] = deque()
        self._held: deque[ReservedDelivery] = deque()
        self._done: list[CompletedDelivery] = []
        self._waves = 0
        self._stirred = self._remembering = False
        self._spare: Coroutine[Any, Any, None] | None = None
        """A hand that has not taken anything yet."""
        self._pace = pace_of(asyncio.get_running_loop())
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = copy_context()
        """What handlers inherit: that of the service, and not what the one before has put into its own."""

    def put(self, delivery: Delivery) -> None:
        """Settle `delivery` when it is its turn."""
        self._context = copy_context()
        if self._lanes.enter(delivery):
            self._ready.append(delivery)
            self._stir()

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Whatever it has under way."""
        return set(self._tasks)

    def forget(self) -> None:
        """All partitions are gone: nothing that waits is begun, and what has run out of time moves no offset."""
        while self._held:
            held = self._held.popleft()
            held.release()
            self._slots.give()
            self._end(held.delivery)
        while self._ready:
            self._leave(self._ready.popleft())

    def release_closed(self) -> None:
        """Release what waits of assignments that are closed: nobody comes to it while an event runs alone."""
        held, self._held = self._held, deque()
        for each in held:
            if each.delivery.assignment.closed:
                each.release()
                self._slots.give()
                self._end(each.delivery)
            else:
                self._held.append(each)

    def _begin(
        self, work: Coroutine[Any, Any, None], ended: Callable[[asyncio.Task[None]], None]
    ) -> asyncio.Task[None]:
        """`ended` is told by callback, since a task that is cancelled before its first step runs no `finally`."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(ended)
        return task

    def _came_to_its_end(self, task: asyncio.Task[None]) -> bool:
        """Otherwise it was cancelled, or has a bug: nothing of ours ends by an error."""
        if task.cancelled():
            return False
        if (error := task.exception()) is not None:
            self._bug(error)
        return error is None

    def _end(self, delivery: Delivery) -> None:
        """It has left us: the next of its lane may begin."""
        delivery.assignment.ended_one(delivery)
        self._leave(delivery)

    def _leave(self, delivery: Delivery) -> None:
        self._let_go(delivery)
        if (following := self._lanes.leave(delivery)) is not None:
            self._ready.append(following)
            self._stir()

    def _settled(self, delivery: Delivery) -> None:
        self._finish(delivery)
        self._end(delivery)

    # Waves.

    def _stir(self) -> None:
        """Begin a wave once all that comes in this turn of the event loop is here."""
        if self._ready and not self._stirred and self._waves < MOST_WAVES:
            self._stirred = True
            asyncio.get_running_loop().call_soon(self._begin_wave, context=self._context)

    def _resume(self) -> None:
        """No event runs alone any longer."""
        self._begin_hands()
        self._stir()

    def _begin_wave(self) -> None:
        self._stirred = False
        if self._isolation.is_closed:
            return  # what is reserved meanwhile would lapse with the process
        taken: deque[Delivery] = deque()
        while self._ready and len(taken) < MOST_TOGETHER:
            if self._ready[0].assignment.closed:
                self._leave(self._ready.popleft())
            elif self._slots.take():
                delivery = self._ready.popleft()
                delivery.assignment.began(delivery)
                taken.append(delivery)
            else:
                break
        if taken:
            self._waves += 1
            self._begin(self._wave(taken), partial(self._wave_ended, taken))
            self._stir()

    def _wave_ended(self, taken: deque[Delivery], task: asyncio.Task[None]) -> None:
        self._waves -= 1
        self._came_to_its_end(task)
        while taken:
            self._slots.give()
            self._end(taken.popleft())
        self._stir()

    async def _wave(self, taken: deque[Delivery]) -> None:
        asked: list[tuple[Delivery, Decoded, GuardedExecution]] = []
        while taken:
            self._meet(taken.popleft(), asked)
        self._begin_hands()
        if asked:
            await self._reserve(asked)

    def _meet(self, delivery: Delivery, asked: list[tuple[Delivery, Decoded, GuardedExecution]]) -> None:
        try:
            met = self._settler.meet(delivery)
        except Exception as error:  # noqa: BLE001  # told to the service
            self._slots.give()
            self._broken(delivery, error)
            return
        handling = met.alone
        if handling is None or not self._settler.gate.is_open:
            self._go_alone(delivery, met)
        elif not isinstance(handling, GuardedExecution):
            self._held.append(ReservedDelivery(delivery, met, handling, None))
        elif handling.is_known_here():
            with met.processing:
                self._duplicate(delivery)
        else:
            asked.append((delivery, met, handling))

    async def _reserve(self, asked: list[tuple[Delivery, Decoded, GuardedExecution]]) -> None:
        executor = asked[0][2].executor
        asked_at = executor.now()
        try:
            verdicts = await executor.reserve_together([handling.work for _, _, handling in asked])
        except StoreError:
            # Each finds out by itself what a store that does not answer means.
            for delivery, met, _ in asked:
                self._go_alone(delivery, met)
            return
        except Exception as error:  # noqa: BLE001  # told to the service
            for delivery, _, _ in asked:
                self._slots.give()
                self._broken(delivery, error)
            return
        except BaseException:
            for delivery, _, _ in asked:
                self._slots.give()
                self._end(delivery)
            raise
        for (delivery, met, handling), verdict in zip(asked, verdicts, strict=True):
            self._sort(delivery, met, handling, verdict, asked_at)
        self._begin_hands()

    def _sort(
        self, delivery: Delivery, met: Decoded, handling: GuardedExecution, verdict: Verdict, asked_at: float
    ) -> None:
        if isinstance(verdict, Reserved):
            run = handling.reserved(verdict, asked_at, self._options)
            if run.is_suspect:
                self._go_reserved(delivery, met, run, _returning(run))
            elif run.has_crashed_too_often:
                self._go_reserved(delivery, met, run, run.give_up)
            else:
                self._held.append(ReservedDelivery(delivery, met, handling, run))
        elif isinstance(verdict, Completed):
            with met.processing:
                handling.executor.blocked(handling.work, verdict)
            self._duplicate(delivery)
        elif isinstance(verdict, KeyReused):
            # It may be that it is run all the same, which takes a slot: it asks once more when it has one.
            self._go_alone(delivery, met)
        else:
            self._go_alone(delivery, met, lambda: handling.declined(verdict))

    def _duplicate(self, delivery: Delivery) -> None:
        self._slots.give()
        self._settler.tally.duplicates += 1
        self._settled(delivery)

    # Hands.

    def _begin_hands(self) -> None:
        if self._held and self._spare is None and not self._isolation.is_closed:
            self._spare = hand = self._hand()
            self._begin(hand, partial(self._hand_ended, hand))

    def _hand_ended(self, hand: Coroutine[Any, Any, None], task: asyncio.Task[None]) -> None:
        if self._spare is hand:
            self._spare = None
        self._came_to_its_end(task)
        self._begin_hands()

    async def _hand(self) -> None:
        done, is_spare = 0, True
        while self._held and not self._isolation.is_closed:
            if done == TURN:
                await asyncio.sleep(0)
                done = 0
                continue
            if self._pace.is_turn_over():
                # Leases are renewed meanwhile, also where no handler awaits anything.
                await self._pace.wait()
                done = 0
                if not self._held or self._isolation.is_closed:
                    break
            if is_spare:
                self._spare, is_spare = None, False
            held = self._held.popleft()
            self._begin_hands()
            if held.is_late():
                await self._reserve_again(held)
                continue
            await self._handle(held)
            done += 1

    async def _reserve_again(self, held: ReservedDelivery) -> None:
        """Reserve again, in one round trip, all that wait with too little of their leases left.

        A reservation that is still ours is found by its token, and goes on as the same attempt.
        """
        waiting, self._held = self._held, deque()
        asked: list[tuple[Delivery, Decoded, GuardedExecution]] = []
        for each in (held, *waiting):
            if each is not held and not each.is_late():
                self._held.append(each)
                continue
            assert each.run is not None
            assert isinstance(each.handling, GuardedExecution)
            each.run.not_started()
            asked.append((each.delivery, each.met, each.handling))
        await self._reserve(asked)

    async def _handle(self, held: ReservedDelivery) -> None:
        delivery, handling = held.delivery, held.handling
        self._isolation.enter()
        try:
            outcome = await in_context(self._context.copy(), self._perform(held))
        except AbandonedError:
            self._end(delivery)
        except Exception as error:  # noqa: BLE001  # raised again where all errors of an attempt are looked at
            self._go_on(held, _raising(error))
        except BaseException:
            self._end(delivery)
            raise
        else:
            if isinstance(outcome, Returned):
                assert isinstance(handling, GuardedExecution)
                self._remember(CompletedDelivery(delivery, handling, outcome))
            elif isinstance(outcome, Executed):
                self._settler.handled(outcome.attempt)
                self._settled(delivery)
            else:
                self._go_on(held, _returning(outcome))
        finally:
            self._isolation.leave()
            self._slots.give()

    async def _perform(self, held: ReservedDelivery) -> Outcome[Any] | Returned[Any] | NotStarted:
        """Run its handler, in this task."""
        delivery, handling = held.delivery, held.handling
        if delivery.assignment.closed:
            held.release()
            raise AbandonedError
        delivery.task = asyncio.current_task()
        try:
            with held.met.processing:
                if isinstance(handling, GuardedExecution):
                    assert held.run is not None
                    return await held.run.call(handling.call_patiently)
                return await handling.attempt(wait_for_store=self._settler.gate.wait_out)
        finally:
            delivery.task = None

    # Remembering.

    def _remember(self, done: CompletedDelivery) -> None:
        self._done.append(done)
        if not self._remembering:
            self._remembering = True
            self._begin(self._remember_all(), self._remembering_ended)

    async def _remember_all(self) -> None:
        while self._done:
            done, self._done = self._done[:MOST_TOGETHER], self._done[MOST_TOGETHER:]
            await self._remember_together(done)
        # In the same step in which nothing more was found: what comes later begins another.
        self._remembering = False

    def _remembering_ended(self, task: asyncio.Task[None]) -> None:
        if not self._came_to_its_end(task):
            self._remembering = False
            self._remember_later()

    def _remember_later(self) -> None:
        """What is done stays done, though nobody is left to wait for that."""
        done, self._done = self._done, []
        for each in done:
            each.returned.run.complete_later(each.returned)
            self._end(each.delivery)

    async def _remember_together(self, done: list[CompletedDelivery]) -> None:
        try:
            written = await done[0].handling.executor.complete_together([each.returned for each in done])
        except StoreError:
            written = [False] * len(done)
        except Exception as error:  # noqa: BLE001  # told to the service
            for each in done:
                self._broken(each.delivery, error)
            return
        except BaseException:
            for each in done:
                self._end(each.delivery)
            raise
        for each, stands in zip(done, written, strict=True):
            if stands:
                self._settler.handled(each.returned.run.attempt.number)
                self._settled(each.delivery)
            else:
                self._conclude_alone(each)

    def _conclude_alone(self, done: CompletedDelivery) -> None:
        async def conclude() -> FirstOutcome:
            return await done.returned.run.complete(done.returned)

        def ended(_: asyncio.Task[None]) -> None:
            if not done.returned.run.is_over:  # it was cancelled before it began
                done.returned.run.complete_later(done.returned)

        task = self._alone(done.delivery, self._settler.go_on(done.delivery, done.handling, conclude))
        task.add_done_callback(ended)

    # One by one.

    def _go_alone(
        self, delivery: Delivery, met: Decoded, begun: Callable[[], Coroutine[Any, Any, FirstOutcome]] | None = None
    ) -> None:
        """By a task of its own, from the beginning; its slot is free for others meanwhile."""
        self._slots.give()
        self._alone(delivery, self._settler.settle(delivery, met, begun))

    def _go_reserved(
        self, delivery: Delivery, met: Decoded, run: Run, begun: Callable[[], Coroutine[Any, Any, FirstOutcome]]
    ) -> None:
        """As `_go_alone`, for one that is reserved and does not run beside others."""

        def ended(_: asyncio.Task[None]) -> None:
            if run.lease is not None and run.lease.is_held and not run.lease.entered:  # cancelled before it began
                run.release()

        self._slots.give()
        self._alone(delivery, self._settler.settle(delivery, met, begun)).add_done_callback(ended)

    def _go_on(self, held: ReservedDelivery, begun: Callable[[], Coroutine[Any, Any, FirstOutcome]]) -> None:
        self._alone(held.delivery, self._settler.go_on(held.delivery, held.handling, begun))

    def _alone(self, delivery: Delivery, settling: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        delivery.task = task = self._begin(settling, partial(self._alone_ended, delivery))
        return task

    def _alone_ended(self, delivery: Delivery, task: asyncio.Task[None]) -> None:
        delivery.task = None
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or isinstance(error, AbandonedError):
            self._end(delivery)
        elif error is not None:
            self._broken(delivery, error)
        else:
            self._settled(delivery)

    def _broken(self, delivery: Delivery, error: BaseException) -> None:
        delivery.assignment.close()
        self._bug(error)
        self._end(delivery)

    def _bug(self, error: BaseException) -> None:
        logger.error("%s: a delivery could not be settled", self._settler.service, exc_info=error)
        self._fail(error)


def _raising(error: Exception) -> Callable[[], Coroutine[Any, Any, FirstOutcome]]:
    async def begun() -> FirstOutcome:
        raise error

    return begun


def _returning(outcome: FirstOutcome) -> Callable[[], Coroutine[Any, Any, FirstOutcome]]:
    async def begun() -> FirstOutcome:
        return outcome

    return begun
