"""The local cache answers duplicates of work that this process has completed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from integr8s_idem.engine.local_cache import LARGEST, LocalCache
from integr8s_idem.engine.run import Returned, Run
from integr8s_idem.engine.work import Work
from integr8s_idem.errors import KeyReusedError, StoreUnavailableError
from integr8s_idem.keys import Key
from integr8s_idem.records import Completed, Completion, InProgress, StoredResult
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_now, virtual_time
from tests.support.guarded import Job, guarded
from tests.support.versions import OrderPlaced, OrderPlacedLater


class SlowAnswers(FlakyStore):
    """A store whose answers to `complete` take a second."""

    def __init__(self) -> None:
        super().__init__(MemoryIdempotencyRepository(clock=virtual_now))

    async def complete(self, completions: Sequence[Completion]) -> list[bool]:
        answers = await super().complete(completions)
        await asyncio.sleep(1)
        return answers


class SilentDeletions(FlakyStore):
    """A store that executes the deletion of a unit, after that of its steps, and does not answer for a minute."""

    def __init__(self) -> None:
        super().__init__(MemoryIdempotencyRepository(clock=virtual_now))

    async def delete(self, keys: Sequence[str]) -> int:
        deleted = await super().delete(keys)
        if deleted:
            await asyncio.sleep(60)
            raise StoreUnavailableError("delete", "its answer was lost")
        return deleted


def done(key: str, body: bytes = b"null") -> Completed:
    return Completed(key=key, attempt=1, completed_at=datetime.now(UTC), result=StoredResult(body))


@virtual_time
async def test_a_duplicate_of_locally_completed_work_does_not_call_the_store() -> None:
    here, job = guarded(local_memory_keys=10), Job()
    assert await here.manager.run("order:1", job) == "receipt-1"

    assert await here.manager.run("order:1", job) == "receipt-1"

    assert (job.runs, here.store.calls["reserve"]) == (1, 1)
    assert here.observer.counts[Signal.DUPLICATE_BLOCKED] == 1
    assert here.observer.counts[Signal.CACHE_HIT] == 1


@virtual_time
async def test_without_the_setting_duplicates_ask_the_store() -> None:
    here, job = guarded(), Job()
    for _ in range(2):
        await here.manager.run("order:1", job)

    assert here.store.calls["reserve"] == 2


@virtual_time
async def test_a_cached_key_with_another_payload_asks_the_store() -> None:
    here, job = guarded(local_memory_keys=10), Job()
    await here.manager.run("order:1", job, fingerprint=b"a" * 16)

    with pytest.raises(KeyReusedError):
        await here.manager.run("order:1", job, fingerprint=b"b" * 16)


@virtual_time
async def test_work_whose_outcome_is_not_kept_is_not_answered_with_the_outcome_of_other_work() -> None:
    here, job = guarded(local_memory_keys=10), Job()
    await here.manager.run("order:1", job)

    outcome = await here.manager.execute(Work(Key.of("order:1"), forgotten=True), job.with_attempt)

    assert isinstance(outcome, InProgress), "it waits until that is no longer kept"
    assert job.runs == 1


@virtual_time
async def test_a_cached_key_with_another_field_set_is_answered() -> None:
    here, job = guarded(local_memory_keys=10), Job()
    await here.manager.run("order:1", job, fingerprint=OrderPlaced(event_id="1"))

    await here.manager.run("order:1", job, fingerprint=OrderPlacedLater(event_id="1"))

    assert (here.store.calls["reserve"], job.runs) == (1, 1)


@virtual_time
async def test_a_deleted_key_is_removed_from_the_cache() -> None:
    here, job = guarded(local_memory_keys=10), Job()
    await here.manager.run("order:1", job)

    await here.manager.delete("order:1")
    await here.manager.run("order:1", job)

    assert job.runs == 2


@virtual_time
async def test_a_key_deleted_while_its_outcome_is_being_written_is_not_cached() -> None:
    here, job = guarded(SlowAnswers(), local_memory_keys=10), Job()
    running = asyncio.create_task(here.manager.run("order:1", job))
    await asyncio.sleep(0.5)
    assert await here.manager.delete("order:1")
    await running

    await here.manager.run("order:1", job)

    assert job.runs == 2


@virtual_time
async def test_a_key_deleted_while_outcomes_are_being_written_together_is_not_cached() -> None:
    here, job = guarded(SlowAnswers(), local_memory_keys=10), Job()
    run = await here.manager.executor.open(Work(Key.of("order:1")))
    assert isinstance(run, Run)
    returned = await run.call(job.with_attempt)
    assert isinstance(returned, Returned)
    writing = asyncio.create_task(here.manager.executor.complete_together([returned]))
    await asyncio.sleep(0.5)
    assert await here.manager.delete("order:1")
    assert await writing == [True]

    await here.manager.run("order:1", job)

    assert job.runs == 2


@virtual_time
async def test_a_key_is_removed_from_the_cache_if_the_answer_to_its_deletion_is_lost() -> None:
    here, job = guarded(SilentDeletions(), local_memory_keys=10), Job()
    await here.manager.run("order:1", job)
    with pytest.raises(StoreUnavailableError):
        await here.manager.delete("order:1")

    await here.manager.run("order:1", job)

    assert job.runs == 2


@virtual_time
async def test_a_key_is_removed_from_the_cache_if_its_deletion_is_cancelled() -> None:
    here, job = guarded(SilentDeletions(), local_memory_keys=10), Job()
    await here.manager.run("order:1", job)
    deleting = asyncio.create_task(here.manager.delete("order:1"))
    await asyncio.sleep(1)
    deleting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deleting

    await here.manager.run("order:1", job)

    assert here.store.calls["reserve"] == 2


@virtual_time
async def test_outcomes_written_after_a_deletion_are_cached() -> None:
    here, job = guarded(local_memory_keys=10), Job()
    await here.manager.delete("order:1")
    for _ in range(2):
        await here.manager.run("order:1", job)

    assert here.store.calls["reserve"] == 1


@virtual_time
async def test_failures_are_not_cached() -> None:
    here, job = guarded(local_memory_keys=10), Job(errors=[OSError("no")])
    with pytest.raises(OSError, match="no"):
        await here.manager.run("order:1", job)

    assert await here.manager.run("order:1", job) == "receipt-1"


def test_an_entry_expires_before_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("integr8s_idem.engine.local_cache.monotonic", lambda: now)
    cache = LocalCache(10)
    cache.keep(done("a"), None, begun=95.0, ttl=timedelta(seconds=10))
    assert cache.look("a", None) is not None

    now = 105.0

    assert cache.look("a", None) is None


def test_the_cache_keeps_the_latest_keys() -> None:
    cache = LocalCache(2)
    for key in "abc":
        cache.keep(done(key), None, begun=0.0, ttl=timedelta(days=36_500))

    assert [cache.look(key, None) is not None for key in "abc"] == [False, True, True]


def test_updating_an_entry_moves_it_to_the_end_without_evictions() -> None:
    cache = LocalCache(2)
    for key in "abaca":
        cache.keep(done(key), None, begun=0.0, ttl=timedelta(days=36_500))

    assert [cache.look(key, None) is not None for key in "abc"] == [True, False, True]


def test_large_results_are_not_cached() -> None:
    cache = LocalCache(2)
    cache.keep(done("a", b"x" * (LARGEST + 1)), None, begun=0.0, ttl=timedelta(days=36_500))

    assert cache.look("a", None) is None


def test_an_outcome_whose_write_began_before_a_key_was_forgotten_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("integr8s_idem.engine.local_cache.monotonic", lambda: 100.0)
    cache = LocalCache(10)
    cache.forget(["a"])
    for key, begun in {"a": 99.0, "b": 100.0, "c": 101.0}.items():
        cache.keep(done(key), None, begun=begun, ttl=timedelta(days=1))

    assert [cache.look(key, None) is not None for key in "abc"] == [False, False, True]
