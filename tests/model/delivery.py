"""The steps of a worker on a delivery: `Pipeline`, `Executor.execute`, `StoreClient.write_outcome`.

Steps of other actors can happen between any two steps. A store call is one step including its answer; `_call` adds the
faults of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from integr8s_idem.records import IdempotencyStatus, Previous
from tests.model.protocol import Protocol
from tests.model.rules import is_late, judge_beginning, judge_effect, judge_owner, judge_reserving, owns
from tests.model.state import (
    IDLE,
    SETTLED,
    Faults,
    Held,
    Key,
    Lease,
    Moves,
    Phase,
    Record,
    Request,
    Rule,
    Run,
    Setup,
    State,
    Step,
    Task,
    Verb,
)
from tests.model.store import Answer, execute, take

TOKENS_OF_A_TASK = 8
"""Number of distinct tokens of each delivery on each worker."""

StoreCall: TypeAlias = tuple[Record | None, int, Request, Record | None, Answer]
"""Record before, highest fence before, request, record after, answer."""


class Here(NamedTuple):
    """A delivery in a state."""

    state: State
    worker: int
    message: int
    task: Task
    key: int

    @property
    def record(self) -> Record | None:
        return self.state.keys[self.key].record


class Deliveries:
    """The steps of all deliveries."""

    def __init__(self, setup: Setup, protocol: Protocol) -> None:
        self.setup = setup
        self.protocol = protocol
        self.messages = setup.messages
        self.calls: set[StoreCall] | None = None
        """All distinct store calls, recorded if this is set."""
        self._of_phase: dict[Phase, Callable[[Here], Moves]] = {
            Phase.ASKING: self._asking,
            Phase.ABOUT_TO_TAKE: self._about_to_take,
            Phase.RESERVED: self._reserved,
            Phase.RUNNING: self._running,
            Phase.EFFECT_DONE: self._effect_done,
            Phase.COMPLETING: self._completing,
            Phase.COMPLETING_AGAIN: self._writing_again,
            Phase.RELEASING: self._releasing,
            Phase.SCHEDULING: self._releasing,
            Phase.FAILING: self._failing,
            Phase.FAILING_AGAIN: self._writing_again,
            Phase.DEAD_LETTERING: self._dead_lettering,
            Phase.FAILING_AFTER_DEAD_LETTER: self._failing,
        }

    def delivered(self, here: Here) -> State:
        """Start the delivery."""
        return put(here, here.state, Task(Phase.ASKING, self._fresh_token(here, here.state, None)))

    def steps(self, here: Here) -> Moves:
        """Yield the next steps."""
        of_phase = self._of_phase.get(here.task.phase)
        return of_phase(here) if of_phase is not None else iter(())

    # Reserving

    def _asking(self, here: Here) -> Moves:
        for what, state, answer in self._call(here, self._request(here, Verb.RESERVE)):
            yield what, self._answered(here, state, answer)

    def _answered(self, here: Here, state: State, answer: Answer | None) -> State:
        match answer:
            case Answer.RESERVED:
                return self._begin(here, state)
            case Answer.LAPSED:
                return put(here, state, here.task._replace(phase=Phase.ABOUT_TO_TAKE, held=_held(here.record)))
            case Answer.COMPLETED:
                return self._settled(here, state)
            case Answer.FAILED:
                return put(here, state, Task(Phase.DEAD_LETTERING))
            case Answer.IN_PROGRESS if not self.protocol.waits_for_work_in_progress:
                return self._settled(here, state)
            case Answer.SCHEDULED if not self.protocol.waits_for_scheduled_work:
                return self._settled(here, state)
            case _:
                return state  # scheduled, in progress elsewhere, or no answer: retries with the same token

    def _begin(self, here: Here, state: State) -> State:
        """Run with the reservation, unless the work has crashed too often."""
        key = state.keys[here.key]
        assert key.record is not None
        held = _held(key.record)
        if key.record.attempt > self.setup.max_attempts and key.record.previous is Previous.LAPSED:
            task = Task(Phase.RUNNING, self._fresh_token(here, state, held), held)
            return put(here, state, self._given_up(task))
        return put(here, state, Task(Phase.RESERVED, held.token, held))

    def _reserved(self, here: Here) -> Moves:
        """Wait for the turn, and start if the lease still holds."""
        held, key = here.task.held, here.state.keys[here.key]
        assert held is not None
        if is_late(key, held) and self.protocol.checks_the_lease_before_a_start:
            yield (
                _step(here, "does not start: its lease has ended"),
                put(here, here.state, Task(Phase.ASKING, held.token)),
            )
        else:
            yield _step(here, "starts"), self._started(here, held, key)
        if here.state.partitions[self.messages[here.message].partition].owner != here.worker:
            yield from self._stopped(here)

    def _started(self, here: Here, held: Held, key: Key) -> State:
        run = Run(held.fence, first=held.attempt == 1)
        broken = judge_beginning(key, held, dead_lettered=here.state.dead_letters[here.message])
        state = here.state._replace(broken=broken)
        if owns(held, key.record):
            state = with_key(state, here.key, key._replace(begun=True))
        return put(here, state, Task(Phase.RUNNING, self._fresh_token(here, state, held), held, run))

    def _about_to_take(self, here: Here) -> Moves:
        """Overwrite the current record; only if reserving is not one step."""
        key = here.state.keys[here.key]
        assert here.task.held is not None
        seen = Record(
            IdempotencyStatus.PROCESSING,
            here.task.held.attempt,
            here.task.held.fence,
            here.task.held.token,
            Lease.ENDED,
            Previous.NONE,
        )
        after = take(seen, key.clock, here.task.token)
        broken = judge_reserving(key.record, after, here.task.token, in_progress=False)
        state = with_record(here.state, here.key, after)._replace(broken=broken)
        yield _step(here, "writes the takeover"), self._begin(here, state)

    # Running

    def _running(self, here: Here) -> Moves:
        yield _step(here, "has its effect"), self._with_effect(here)
        yield from self._raising(here, "fails before its effect")
        yield from self._renewing(here)

    def _effect_done(self, here: Here) -> Moves:
        yield from self._completing(here)
        yield from self._raising(here, "fails after its effect")
        yield from self._renewing(here)

    def _with_effect(self, here: Here) -> State:
        before, run = here.state.keys[here.key], here.task.run
        assert run is not None
        after = before._replace(unaware=before.unaware + run.first, sink=max(before.sink, run.fence))
        state = with_key(here.state, here.key, after)._replace(broken=judge_effect(before, after, run))
        return put(here, state, here.task._replace(phase=Phase.EFFECT_DONE, run=None))

    def _raising(self, here: Here, what: str) -> Moves:
        if not here.state.faults.failures:
            return
        faults = here.state.faults._replace(failures=here.state.faults.failures - 1)
        state, task = here.state._replace(faults=faults), here.task._replace(run=None)
        assert task.held is not None
        yield _step(here, f"{what}, for good", is_fault=True), put(here, state, self._given_up(task))
        if task.held.attempt < self.setup.max_attempts:
            yield _step(here, what, is_fault=True), put(here, state, task._replace(phase=Phase.RELEASING))
            later = task._replace(phase=Phase.SCHEDULING)
            yield _step(here, f"{what}, to be retried later", is_fault=True), put(here, state, later)
        discarded = put(here, state, task._replace(phase=Phase.COMPLETING))
        if not self.protocol.discard_waits_for_completion:
            discarded = self._settled(here, state)
        yield _step(here, f"{what}, and is discarded", is_fault=True), discarded
        yield from self._stopping(here._replace(state=state, task=task), what)

    def _stopping(self, here: Here, what: str) -> Moves:
        """Stop the service with an event that is not settled: its next start redelivers it."""
        for step, state, _ in self._call(here, self._request(here, Verb.RELEASE), f"{what}, stops its service and "):
            stopped = put(here, state, IDLE) if self.protocol.stop_keeps_the_event else self._settled(here, state)
            yield step._replace(is_fault=True), stopped

    def _given_up(self, task: Task) -> Task:
        first = Phase.FAILING if self.protocol.fails_before_the_dead_letter else Phase.DEAD_LETTERING
        return task._replace(phase=first)

    def _renewing(self, here: Here) -> Moves:
        """Renew while the handler runs. Renewing a live lease changes nothing and is not a step."""
        renewed, answer = self.executed(here.state, self._request(here, Verb.RENEW))
        if renewed is not here.state:
            yield _step(here, "renews, late but in time"), renewed
        if renewed is not here.state or answer is not Answer.YES:
            yield _step(here, "is cancelled: its lease was lost"), self._try_again(here, here.state)
        elif here.state.faults.unanswered:
            state = here.state._replace(faults=_less_unanswered(here.state.faults))
            stopped = self._try_again(here, state)
            yield _step(here, "gets no answer to renewals and stops in time", is_fault=True), stopped
        if answer is not Answer.YES:
            yield from self._after_rejected_renewal(here)
        if here.state.partitions[self.messages[here.message].partition].owner != here.worker:
            yield from self._stopped(here)

    def _after_rejected_renewal(self, here: Here) -> Moves:
        """Handle a rejected renewal; if the record was only lost, the run continues with a new reservation."""
        for what, state, answer in self._call(here, self._request(here, Verb.RESERVE), "is not renewed and "):
            if answer is None:
                yield what, state
            elif answer is not Answer.RESERVED:
                yield what, self._try_again(here, state)
            else:
                yield what, self._reserved_again(here, state)
                if here.task.phase is Phase.EFFECT_DONE:
                    # The handler ended in the meantime, and completes with its first reservation.
                    late = what._replace(what=f"{what.what}, too late")
                    yield late, put(here, state, here.task._replace(phase=Phase.COMPLETING))

    def _reserved_again(self, here: Here, state: State) -> State:
        key = state.keys[here.key]
        task = here.task._replace(held=_held(key.record))
        if key.record is not None and key.record.previous is Previous.NONE:
            return put(here, with_key(state, here.key, key._replace(begun=True)), task)
        # Another worker had the key in between, and may have had effects.
        return put(here, state, task._replace(phase=Phase.RELEASING, run=None))

    def _stopped(self, here: Here) -> Moves:
        """Cancel the run and release the key, because the partition was lost or the worker stops."""
        for what, state, _ in self._call(here, self._request(here, Verb.RELEASE), "is stopped and "):
            yield what, put(here, state, IDLE)

    # Writing the outcome

    def _completing(self, here: Here) -> Moves:
        for what, state, answer in self._call(here, self._request(here, Verb.COMPLETE)):
            if answer is Answer.YES:
                yield what, self._settled(here, state)
            elif answer is None:
                yield what, put(here, state, here.task._replace(phase=Phase.COMPLETING))
            elif here.record is None and not self.protocol.missing_record_is_written_again:
                yield what, self._settled(here, state)
            else:
                yield what, put(here, state, here.task._replace(phase=Phase.COMPLETING_AGAIN))

    def _failing(self, here: Here) -> Moves:
        for what, state, answer in self._call(here, self._request(here, Verb.FAIL)):
            if answer is None:
                yield what, state
            elif here.task.phase is Phase.FAILING_AFTER_DEAD_LETTER:
                yield what, self._settled(here, state)
            elif answer is not Answer.YES:
                yield what, put(here, state, here.task._replace(phase=Phase.FAILING_AGAIN))
            elif self.protocol.failed_is_dead_lettered:
                yield what, put(here, state, Task(Phase.DEAD_LETTERING))
            else:
                yield what, self._settled(here, state)

    def _writing_again(self, here: Here) -> Moves:
        """Reserve the key again after the store rejected the token, and write the outcome if that succeeds."""
        again = Phase.COMPLETING if here.task.phase is Phase.COMPLETING_AGAIN else Phase.FAILING
        for what, state, answer in self._call(here, self._request(here, Verb.RESERVE)):
            if answer is None:
                yield what, state
            elif answer is Answer.RESERVED:
                held = _held(state.keys[here.key].record)
                yield what, put(here, state, here.task._replace(phase=again, held=held))
            else:
                yield what, self._try_again(here, state)

    def _releasing(self, here: Here) -> Moves:
        """Release the key, with a delay or without; without an answer the lease ends by itself."""
        verb = Verb.RELEASE if here.task.phase is Phase.RELEASING else Verb.SCHEDULE
        for what, state, _ in self._call(here, self._request(here, verb)):
            yield what, self._try_again(here, state)

    def _dead_lettering(self, here: Here) -> Moves:
        dead_letters = here.state.dead_letters
        dead_letters = (*dead_letters[: here.message], True, *dead_letters[here.message + 1 :])
        state = here.state._replace(dead_letters=dead_letters)
        if here.task.held is not None:
            state = put(here, state, here.task._replace(phase=Phase.FAILING_AFTER_DEAD_LETTER))
        else:
            state = self._settled(here, state)
        yield _step(here, "dead-letters the message"), state

    def _try_again(self, here: Here, state: State) -> State:
        """Start the next pass, since nothing was settled."""
        token = self._fresh_token(here, state, None) if self.protocol.token_for_each_pass else here.task.token
        return put(here, state, Task(Phase.ASKING, token))

    def _settled(self, here: Here, state: State) -> State:
        """Allow the offset to move, if the worker still owns the partition."""
        if state.partitions[self.messages[here.message].partition].owner == here.worker:
            return put(here, state, SETTLED)
        return put(here, state, IDLE if self.protocol.only_the_present_epoch_commits else SETTLED)

    # Store calls

    def _request(self, here: Here, verb: Verb) -> Request:
        if verb is Verb.RESERVE:
            return Request(verb, here.key, here.task.token, worker=here.worker)
        assert here.task.held is not None
        return Request(verb, here.key, here.task.held.token, here.task.held.fence)

    def _call(
        self, here: Here, request: Request, introduction: str = ""
    ) -> Iterator[tuple[Step, State, Answer | None]]:
        """Yield the outcomes of a call. A request that is lost and repeated changes nothing and is not a step."""
        state, faults = here.state, here.state.faults
        after, answer = self.executed(state, request)
        what = f"{introduction}asks to {request.verb.value}"
        yield _step(here, f"{what}: {answer.value}"), after, answer
        if faults.unanswered:
            unheard = after._replace(faults=_less_unanswered(faults))
            yield _step(here, f"{what}: executed, but the answer is lost", is_fault=True), unheard, None
        if faults.late:
            network = tuple(sorted((*state.network, request)))
            later = state._replace(faults=faults._replace(late=faults.late - 1), network=network)
            yield _step(here, f"{what}: delayed, and given up by the caller", is_fault=True), later, None

    def executed(self, state: State, request: Request) -> tuple[State, Answer]:
        """Execute a call in the store, and check the rules."""
        key = state.keys[request.key]
        before = key.record
        after, answer = execute(self.protocol, before, key.clock, request)
        if self.calls is not None:
            self.calls.add((before, key.clock, request, after, answer))
        broken: Rule | None
        if request.verb is Verb.RESERVE:
            assert after is not None
            broken = judge_reserving(before, after, request.token, in_progress=answer is Answer.IN_PROGRESS)
        else:
            broken = judge_owner(before, after, Held(request.token, request.fence, 0))
        if after == before and broken is None:
            return state, answer
        return with_record(state, request.key, after)._replace(broken=broken), answer

    def _fresh_token(self, here: Here, state: State, held: Held | None) -> int:
        """Return an unused token: the lowest one of this delivery."""
        record = state.keys[here.key].record
        used = {request.token for request in state.network}
        used |= {record.token if record else 0, held.token if held else 0}
        first = 1 + TOKENS_OF_A_TASK * (here.worker * len(self.messages) + here.message)
        return next(token for token in range(first, first + TOKENS_OF_A_TASK) if token not in used)


def put(here: Here, state: State, task: Task) -> State:
    """Return the state with another task for `here`."""
    tasks = state.workers[here.worker]
    tasks = (*tasks[: here.message], task, *tasks[here.message + 1 :])
    return state._replace(workers=(*state.workers[: here.worker], tasks, *state.workers[here.worker + 1 :]))


def with_key(state: State, index: int, key: Key) -> State:
    return state._replace(keys=(*state.keys[:index], key, *state.keys[index + 1 :]))


def with_record(state: State, index: int, record: Record | None) -> State:
    """Return the state with another record of a key, and update the facts that depend on it."""
    key = state.keys[index]
    if record is None:
        return with_key(state, index, key._replace(record=None, begun=False))
    same = key.record is not None and record.fence == key.record.fence
    clock = max(key.clock, record.fence)
    state = with_key(state, index, key._replace(record=record, clock=clock, begun=key.begun and same))
    if record.status is IdempotencyStatus.COMPLETED and not state.done[index]:
        state = state._replace(done=(*state.done[:index], True, *state.done[index + 1 :]))
    return state


def _held(record: Record | None) -> Held:
    assert record is not None
    return Held(record.token, record.fence, record.attempt)


def _less_unanswered(faults: Faults) -> Faults:
    return faults._replace(unanswered=faults.unanswered - 1)


def _step(here: Here, what: str, *, is_fault: bool = False) -> Step:
    return Step(what, here.worker, here.message, here.key, is_fault)
