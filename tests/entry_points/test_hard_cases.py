"""Hard cases, written once and run on every entry point: `test_concurrent_duplicate[faststream]`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from integr8s_idem.telemetry import Signal
from tests.entry_points.entry import Answer, Case, Entry, Seen, Sees, seen
from tests.entry_points.ground import ENTRIES, Crashes, Ground, Opened
from tests.support.conditions import eventually
from tests.support.fault_proxy import Refuse, Stall
from tests.support.gated import GatedWork
from tests.support.redis import RedisServer

SHORT = 1.0
"""Lease in seconds that expires during the test."""

MAX_ATTEMPTS = 2

FALSY: list[Any] = [None, 0, "", [], {}, False]

PARAMETERS = [
    pytest.param(entry, id=entry.name, marks=[pytest.mark.kafka] if entry.needs_kafka else []) for entry in ENTRIES
]

pytestmark = pytest.mark.parametrize("kind", PARAMETERS)


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crashes]:
    crashes = Crashes(tmp_path_factory.mktemp("effects"))
    yield crashes
    crashes.close()


@pytest.fixture
async def ground(
    request: pytest.FixtureRequest, kind: type[Entry], redis_server: RedisServer, topic_prefix: str, crashes: Crashes
) -> AsyncIterator[Ground]:
    redis_server.flush()
    kafka = request.getfixturevalue("kafka") if kind.needs_kafka else None
    async with Ground(redis_server.address, kafka, crashes, topic_prefix) as ground:
        yield ground


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("aiokafka", "confluent", "faststream_guard"):
        monkeypatch.setattr(f"integr8s_idem.integrations.{module}.pause_after", lambda _: 0.02)


async def _finish(entry: Entry, first: Answer, key: str = "k", payload: str = "p") -> list[Answer]:
    """Retry until an answer is final, and return all answers."""
    answers = [first]
    async with asyncio.timeout(30):
        while not answers[-1].final:
            await asyncio.sleep(0.02)
            answers.append(await entry.retry(key, payload))
    return answers


async def _settled(entry: Entry, key: str = "k", payload: str = "p") -> list[Answer]:
    return await _finish(entry, await entry.send(key, payload), key, payload)


def _as_declared(answers: list[Answer], expected: Seen) -> bool:
    """Return whether the answers are as expected; on a busy machine a short lease may end before any conflict."""
    return seen(answers) in (expected, tuple(sees for sees in expected if sees is not Sees.CONFLICT))


def _of_healed_store(kind: type[Entry], answers: list[Answer]) -> list[Answer]:
    """Return the answers without those that a broker got by redelivering before the store was healed."""
    first, *others = answers
    return [first, *[answer for answer in others if answer.sees is not Sees.DOWN or not kind.needs_kafka]]


def _values(*answers: Answer) -> list[Any]:
    return [answer.value for answer in answers if answer.sees is Sees.VALUE]


async def test_concurrent_duplicate(kind: type[Entry], ground: Ground) -> None:
    work = GatedWork("the first's", "another", held=True)
    first, second = await ground.process(kind, work), await ground.process(kind, work)

    one = asyncio.create_task(_settled(first.entry))
    await eventually(lambda: work.runs)
    answers: list[Answer] = []
    two = asyncio.create_task(_send_and_finish(second, answers))
    await eventually(lambda: answers or second.observer.counts[Signal.CACHE_HIT])
    assert not await first.entry.acknowledged()
    assert not await second.entry.acknowledged()
    work.may_end.set()
    answers = await two

    assert seen(answers) == kind.expected(Case.TWO_AT_ONCE)
    assert _values(*await one, *answers) == ["the first's", "the first's"]
    assert len(work.runs) == 1


async def _send_and_finish(opened: Opened, answers: list[Answer]) -> list[Answer]:
    answers.append(await opened.entry.send("k"))
    return await _finish(opened.entry, answers[0])


async def test_crash_after_the_effect(kind: type[Entry], ground: Ground) -> None:
    place = ground.new_place()
    crashed = await ground.crash(kind, "k", place, SHORT)

    successor = await ground.process(kind, GatedWork("the successor's"), place=place)
    answers = await _finish(successor.entry, await successor.entry.retry("k"))

    assert _as_declared(answers, kind.expected(Case.CRASH)), answers
    assert crashed["attempt"] == 1
    assert successor.entry.work.attempts == ([2] if kind.repeats else [])
    assert all(run.fence > crashed["fence"] for run in successor.entry.work.runs)
    assert _values(*answers) == (["the successor's"] if kind.repeats else [])


async def test_failure(kind: type[Entry], ground: Ground) -> None:
    work = GatedWork(OSError("no"), "done")
    process = await ground.process(kind, work)

    answers = await _settled(process.entry)

    assert seen(answers) == kind.expected(Case.FAILURE)
    assert work.attempts == ([1, 2] if kind.repeats else [1])
    assert _values(*answers) == (["done"] if kind.repeats else [])


async def test_failures_without_end(kind: type[Entry], ground: Ground) -> None:
    work = GatedWork(OSError("no"))
    process = await ground.process(kind, work, max_attempts=MAX_ATTEMPTS)
    gives_up = Sees.GIVEN_UP in kind.expected(Case.FAILURES)

    answers = [await process.entry.send("k")]
    while not answers[-1].final and len(answers) < 2 * MAX_ATTEMPTS:
        answers.append(await process.entry.retry("k"))

    assert seen(answers) == kind.expected(Case.FAILURES)
    most = MAX_ATTEMPTS if gives_up else 2 * MAX_ATTEMPTS
    assert work.attempts == list(range(1, 1 + (most if kind.repeats else 1)))
    if gives_up:
        assert (await process.entry.send("k")).sees is Sees.GIVEN_UP
        assert len(work.runs) == (MAX_ATTEMPTS if kind.repeats else 1)


async def test_zombie(kind: type[Entry], ground: Ground) -> None:
    stalled = GatedWork("the zombie's", held=True, stubborn=True)
    zombie = await ground.process(kind, stalled, processing_timeout_seconds=SHORT)
    successor = await ground.process(kind, GatedWork("the successor's"))

    one = asyncio.create_task(zombie.entry.send("k"))
    await eventually(lambda: stalled.runs)
    zombie.store.put(Stall())
    taken_over = await _settled(successor.entry)
    zombie.store.heal()
    stalled.may_end.set()
    first = await one
    assert not await zombie.entry.acknowledged()
    answers = await _finish(zombie.entry, first)

    assert seen(answers) == kind.expected(Case.ZOMBIE)
    assert _values(*taken_over, *answers) == (["the successor's"] * 2 if kind.repeats else [])
    assert (len(stalled.runs), successor.entry.work.attempts) == (1, [2] if kind.repeats else [])
    assert all(run.fence > stalled.runs[0].fence for run in successor.entry.work.runs)


async def test_other_payload(kind: type[Entry], ground: Ground) -> None:
    process = await ground.process(kind, GatedWork("of one", "of two"))

    first = await process.entry.send("k", "one")
    answers = await _settled(process.entry, "k", "two")
    again = await process.entry.send("k", "one")

    assert seen(answers) == kind.expected(Case.OTHER_PAYLOAD)
    assert _values(first, again) == ["of one", "of one"]
    assert [run.payload for run in process.entry.work.runs] == ["one"]


async def test_store_down_before(kind: type[Entry], ground: Ground) -> None:
    process = await ground.process(kind, GatedWork())
    _cut_off(process)

    first = await process.entry.send("k")
    assert not process.entry.work.runs
    assert not await process.entry.acknowledged()
    process.store.heal()
    answers = await _finish(process.entry, first)

    assert seen(answers) == kind.expected(Case.DOWN_BEFORE)
    assert process.entry.work.attempts == [1]
    assert _values(*answers) == ["done"]


def _cut_off(process: Opened) -> None:
    process.store.put(Refuse())
    process.store.reset()


async def test_store_down_after_the_effect_for_a_moment(kind: type[Entry], ground: Ground) -> None:
    work = GatedWork(held=True)
    process = await ground.process(kind, work)
    answers: list[Answer] = []

    one = asyncio.create_task(_send_and_finish(process, answers))
    await eventually(lambda: work.runs)
    _cut_off(process)
    work.may_end.set()
    await eventually(lambda: process.observer.counts[Signal.STORE_ERROR] or answers)
    assert not await process.entry.acknowledged()
    process.store.heal()

    assert seen(await one) == kind.expected(Case.DOWN_AFTER)
    assert _values(*await one, await process.entry.send("k")) == ["done", "done"]
    assert work.attempts == [1]


async def test_store_down_after_the_effect_beyond_the_lease(kind: type[Entry], ground: Ground) -> None:
    work = GatedWork("first", "second", held=True)
    process = await ground.process(kind, work, processing_timeout_seconds=SHORT)

    one = asyncio.create_task(process.entry.send("k"))
    await eventually(lambda: work.runs)
    _cut_off(process)
    work.may_end.set()
    first = await one
    assert not await process.entry.acknowledged()
    # The lease of a step ends later than that of its run, and its outcome is written in the background until then.
    await asyncio.sleep(SHORT)
    process.store.heal()
    answers = _of_healed_store(kind, await _finish(process.entry, first))

    assert _as_declared(answers, kind.expected(Case.DOWN_FOR_LONG)), answers
    # Work whose outcome could not be stored is repeated on a retry.
    retried = first.sees in {Sees.UNSTORED, Sees.LOST, Sees.AGAIN}
    assert work.attempts == ([1, 2] if retried and kind.repeats else [1])


async def test_result_too_large(kind: type[Entry], ground: Ground) -> None:
    large = "x" * 200
    process = await ground.process(kind, GatedWork(large), max_result_size_bytes=100)

    first = await process.entry.send("k")
    duplicate = await _settled(process.entry)

    assert _values(first) == [large]
    assert seen(duplicate) == kind.expected(Case.TOO_LARGE)
    assert len(process.entry.work.runs) == 1


async def test_falsy_results(kind: type[Entry], ground: Ground) -> None:
    process = await ground.process(kind, GatedWork(*FALSY))

    firsts = [await process.entry.send(f"k{number}") for number in range(len(FALSY))]
    duplicates = [await process.entry.send(f"k{number}") for number in range(len(FALSY))]

    assert seen(firsts) == seen(duplicates) == kind.expected(Case.FALSY)
    for value, first, duplicate in zip(FALSY, firsts, duplicates, strict=True):
        assert first.value == duplicate.value == value
        assert type(first.value) is type(duplicate.value) is type(value)
    assert len(process.entry.work.runs) == len(FALSY)


async def test_returned_iterator(kind: type[Entry], ground: Ground) -> None:
    process = await ground.process(kind, GatedWork(lambda _: map(str.upper, ["a", "b"])))

    answers = [await process.entry.send("k"), await process.entry.send("k")]

    assert seen(answers) == kind.expected(Case.ITERATOR)
    assert all(value == ["A", "B"] for value in _values(*answers))
    assert len(process.entry.work.runs) == 1


async def test_cancellation(kind: type[Entry], ground: Ground) -> None:
    work = GatedWork("done", held=True)
    process = await ground.process(kind, work, processing_timeout_seconds=kind.cancel_lease)

    sending = asyncio.create_task(process.entry.send("k"))
    await eventually(lambda: work.runs)
    await process.entry.cancel(sending)
    try:
        first = await sending
    except asyncio.CancelledError:
        first = Answer(Sees.CANCELLED)
    assert work.finished == 0
    assert not await process.entry.acknowledged()
    work.may_end.set()
    answers = await _finish(process.entry, first)

    assert _as_declared(answers, kind.expected(Case.CANCELLED)), answers
    assert work.attempts == ([1, 2] if kind.repeats else [1])
    assert _values(*answers) == (["done"] if kind.repeats else [])
