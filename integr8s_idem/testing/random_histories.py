"""Compare the answers of a store in random histories with `Model`.  Needs hypothesis."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import uuid4

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from integr8s_idem.records import (
    Completed,
    Completion,
    Failed,
    Failure,
    KeyReused,
    Pending,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
    Verdict,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.testing.reference_model import COMPLETED, FAILED, RESERVED, Model, ModelRecord, Owner

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Run = Callable[[Coroutine[Any, Any, Any]], Any]

_SLACK = timedelta(seconds=4)
"""Real time that one history may take: less than the smallest step between two times below.

A history that takes longer, on a stalled machine, is not compared further, because leases may have expired."""

# Multiples of ten, advanced by odd steps, so that no time is just after the current one.
_LEASES = st.sampled_from([10, 30, 50])
_RETENTIONS = st.sampled_from([60, 200])
_TTLS = st.sampled_from([40, 400])
_STEPS = st.sampled_from([5, 10, 35, 100, 300])
_KEYS = st.sampled_from(["a", "b", "c"])
# Two that are compared whole, and two field sets with two digests each.
_FINGERPRINTS = st.sampled_from(
    [None, None, b"1" * 16, b"2" * 16]
    + [field_set + digest * 12 for field_set in (b"\x80set", b"\xffset") for digest in (b"1", b"2")]
)
_RESULTS = st.none() | st.builds(StoredResult, st.binary(max_size=60), st.sampled_from(["application/json", "text/x"]))


@dataclass(frozen=True, slots=True)
class HistorySize:
    """The number of histories and of steps in each."""

    histories: int = 50
    steps: int = 30


async def check_histories(
    repository: IdempotencyRepository,
    advance: Callable[[timedelta], Awaitable[None]],
    size: HistorySize,
    stopwatch: Callable[[], float] = time.monotonic,
) -> None:
    """Compare random histories with the model.

    Args:
        repository: The store.  It may contain records: each history uses its own keys.
        advance: Moves the clock of the store.
        size: The number of histories and steps.
        stopwatch: Returns seconds of real time.

    Raises:
        AssertionError: An answer differs from the model, shown with the shortest such history; or most histories took
            longer than four seconds of real time, so that little was compared.
    """
    loop = asyncio.get_running_loop()
    histories: list[_History] = []

    def run(step: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(step, loop).result(timeout=60)

    def machine() -> _History:
        histories.append(_History(repository, advance, run, stopwatch))
        return histories[-1]

    # Hypothesis is synchronous: it runs in a thread, and each step on the loop.
    await asyncio.to_thread(
        run_state_machine_as_test,
        machine,  # type: ignore[arg-type]  # any factory is accepted
        settings=settings(
            max_examples=size.histories,
            stateful_step_count=size.steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    timed_out = sum(history.timed_out for history in histories)
    assert timed_out * 2 <= len(histories), (
        f"{timed_out} of {len(histories)} histories took longer than {_SLACK.total_seconds():g} s, "
        "and were not compared completely: use a faster server, or fewer `steps` in HistorySize"
    )


class _TimedOutError(Exception):
    """So much real time has passed that the model does not know which leases have expired."""


def _in_time(
    step: Callable[Concatenate[_History, _P], None],
) -> Callable[Concatenate[_History, _P], None]:
    """Skip the step if the history took too long.

    The history is not ended, because Hypothesis reports histories that end at different steps as flaky.
    """

    @functools.wraps(step)
    def _step(self: _History, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self.timed_out:
            return
        try:
            step(self, *args, **kwargs)
        except _TimedOutError:
            self.timed_out = True

    return _step


def _tokens() -> Iterator[bytes]:
    return (number.to_bytes(16, "big") for number in itertools.count(1))


class _History(RuleBasedStateMachine):
    """One history: a few keys, with current and former requests and owners."""

    def __init__(
        self,
        repository: IdempotencyRepository,
        advance: Callable[[timedelta], Awaitable[None]],
        run: _Run,
        stopwatch: Callable[[], float],
    ) -> None:
        super().__init__()
        self.repository = repository
        self.advance = advance
        self._run = run
        self._stopwatch = stopwatch
        self._began = stopwatch()
        self.timed_out = False
        self.root = f"histories:{uuid4().hex}:"
        self.model = Model()
        self.tokens = _tokens()
        self.requests: list[ReserveRequest] = []
        self.reservations: dict[Owner, Reserved] = {}
        self.highest: dict[str, int] = {}

    def run(self, step: Coroutine[Any, Any, _T]) -> _T:
        answer: _T = self._run(step)
        if self._stopwatch() - self._began >= _SLACK.total_seconds():
            raise _TimedOutError
        return answer

    @rule(
        wanted=st.lists(st.tuples(_KEYS, _FINGERPRINTS, st.booleans(), st.booleans()), min_size=1, max_size=4),
        lease=_LEASES,
        life=_RETENTIONS,
    )
    @_in_time
    def reserve(self, wanted: list[tuple[str, bytes | None, bool, bool]], lease: int, life: int) -> None:
        requests = [
            ReserveRequest(
                key=self.root + key,
                token=(token := next(self.tokens)),
                lease=timedelta(seconds=lease),
                retention=timedelta(seconds=life),
                fingerprint=fingerprint,
                alone=alone,
                trace=TraceLink(token, token[-8:]) if is_traced else None,
            )
            for key, fingerprint, alone, is_traced in wanted
        ]
        self.requests += requests
        self._reserve(requests)

    @rule(which=st.integers(0, 200))
    @_in_time
    def reserve_again_as_if_the_answer_was_lost(self, which: int) -> None:
        if not self.requests:
            return
        request = self.requests[which % len(self.requests)]
        found = self.model.record(request.key)
        # A request repeated after its own release may be answered either way.
        if found is None or not found.released or found.owner.token != request.token:
            self._reserve([request])

    def _reserve(self, requests: list[ReserveRequest]) -> None:
        verdicts = self.run(self.repository.reserve(requests))
        assert len(verdicts) == len(requests)
        for request, verdict in zip(requests, verdicts, strict=True):
            turns = self.model.turns
            name, record = self.model.reserve(
                request.key,
                request.token,
                _seconds(request.lease),
                _seconds(request.retention),
                request.fingerprint,
                request.alone,
                request.trace,
            )
            assert type(verdict).__name__ == name
            assert verdict.key == request.key
            self._compare(verdict, record, self.model.now)
            if isinstance(verdict, Reserved):
                is_new = self.model.turns > turns
                self._remember(verdict, record.owner, new=is_new)
                # A repeated request may get no trace, but never another one.
                assert verdict.trace == record.previous_trace or (verdict.trace is None and not is_new)

    def _compare(self, verdict: Verdict, record: ModelRecord, now: int) -> None:
        if isinstance(verdict, KeyReused):
            assert verdict.stored == record.fingerprint
            return
        assert not isinstance(verdict, Reserved | Pending | Completed | Failed) or verdict.attempt == record.attempt
        if isinstance(verdict, Reserved):
            assert verdict.previous.value == record.previous
            assert (verdict.lapsed, verdict.lapsed_alone) == (record.lapsed, record.lapsed_alone)
        if isinstance(verdict, Pending):
            left = timedelta(seconds=record.lease_until - now)
            assert left - _SLACK < verdict.retry_after <= left
        if isinstance(verdict, Completed):
            assert (verdict.result, verdict.result_dropped) == record.outcome
        if isinstance(verdict, Failed):
            assert verdict.error == record.outcome

    def _remember(self, verdict: Reserved, owner: Owner, *, new: bool) -> None:
        if new:
            assert verdict.fence > self.highest.get(verdict.key, 0)
            self.highest[verdict.key] = verdict.fence
            self.reservations[owner] = verdict
        else:
            assert verdict.fence == self.reservations[owner].fence

    def _any(self, which: int) -> tuple[Owner, Reserved] | None:
        if not self.reservations:
            return None
        # Counted from the newest, which most likely still owns its key.
        owners = list(self.reservations)
        owner = owners[-1 - which % len(owners)]
        return owner, self.reservations[owner]

    @rule(which=st.integers(0, 6), lease=_LEASES)
    @_in_time
    def renew(self, which: int, lease: int) -> None:
        if chosen := self._any(which):
            owner, reserved = chosen
            answers = self.run(self.repository.renew([reserved], timedelta(seconds=lease)))
            assert answers == [self.model.renew(owner, lease)]

    @rule(which=st.integers(0, 6))
    @_in_time
    def release(self, which: int) -> None:
        if chosen := self._any(which):
            owner, reserved = chosen
            assert self.run(self.repository.release([reserved])) == [self.model.release(owner)]

    @rule(which=st.integers(0, 6), delay=_LEASES, retention=_RETENTIONS, times=st.integers(1, 2))
    @_in_time
    def schedule(self, which: int, delay: int, retention: int, times: int) -> None:
        if chosen := self._any(which):
            owner, reserved = chosen
            lengths = {"delay": timedelta(seconds=delay), "retention": timedelta(seconds=retention)}
            answers = self.run(self.repository.release([reserved] * times, **lengths))
            assert answers == [self.model.schedule(owner, delay, retention) for _ in range(times)]

    @rule(which=st.integers(0, 6), ttl=_TTLS, result=_RESULTS, dropped=st.booleans(), times=st.integers(1, 2))
    @_in_time
    def complete(self, which: int, ttl: int, result: StoredResult | None, dropped: bool, times: int) -> None:
        if chosen := self._any(which):
            owner, reserved = chosen
            completion = Completion(
                reservation=reserved, ttl=timedelta(seconds=ttl), result=result, result_dropped=dropped
            )
            answers = self.run(self.repository.complete([completion] * times))
            assert answers == [self.model.settle(owner, COMPLETED, ttl, (result, dropped)) for _ in range(times)]

    @rule(which=st.integers(0, 6), ttl=_TTLS, error=st.text(max_size=20))
    @_in_time
    def fail(self, which: int, ttl: int, error: str) -> None:
        if chosen := self._any(which):
            owner, reserved = chosen
            failure = Failure(reservation=reserved, ttl=timedelta(seconds=ttl), error=error)
            assert self.run(self.repository.fail([failure])) == [self.model.settle(owner, FAILED, ttl, error)]

    @rule(key=_KEYS)
    @_in_time
    def delete(self, key: str) -> None:
        full = self.root + key
        assert self.run(self.repository.delete([full, full])) == self.model.delete(full)

    @rule(seconds=_STEPS)
    @_in_time
    def time_passes(self, seconds: int) -> None:
        self.run(_awaited(self.advance(timedelta(seconds=seconds))))
        self.model.now += seconds

    @invariant()
    @_in_time
    def the_records_are_those_of_the_model(self) -> None:
        keys = [self.root + key for key in "abc"]
        for key, record in zip(keys, self.run(self.repository.get(keys)), strict=True):
            expected = self.model.record(key)
            assert (record is None) == (expected is None)
            if record is not None and expected is not None:
                assert record.status.value == {RESERVED: "processing"}.get(expected.status, expected.status.lower())
                assert (record.attempt, record.fingerprint) == (expected.attempt, expected.fingerprint)
                assert record.expires_at is not None
                assert record.is_scheduled == (expected.status == RESERVED and expected.scheduled)

    @invariant()
    @_in_time
    def the_active_keys_are_those_of_the_model(self) -> None:
        assert self.run(self.repository.count_active(self.root)) == self.model.active()


async def _awaited(step: Awaitable[_T]) -> _T:
    return await step


def _seconds(duration: timedelta) -> int:
    return int(duration.total_seconds())
