"""Custom consumer loops on real Kafka with aiokafka and confluent-kafka: their effects and commits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from integr8s_idem import IdempotencyManager, MemoryIdempotencyRepository
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.errors import (
    ApplicationError,
    InvalidKeyError,
    KeyReusedError,
    PreviouslyFailedError,
    ResultDroppedError,
    ServiceStoppedError,
    StoreUnavailableError,
)
from integr8s_idem.failures import dead_letter, discard, retry, stop
from integr8s_idem.integrations.kafka_loops import by_position
from integr8s_idem.keys import EntryPoint, Key
from integr8s_idem.records import Reserved
from integr8s_idem.testing.flaky_store import FlakyStore
from tests.support.conditions import eventually
from tests.support.gated import GatedWork
from tests.support.kafka import Kafka
from tests.support.loops import AiokafkaLoop, ConfluentLoop, Loop, Topic

pytestmark = pytest.mark.kafka

KINDS: dict[str, Callable[..., Loop]] = {"aiokafka": AiokafkaLoop, "confluent": ConfluentLoop}


class Bench:
    """One topic, one store, and the loops that use them."""

    def __init__(self, kind: Callable[..., Loop], topic: Topic) -> None:
        self.kind = kind
        self.topic = topic
        self.store = FlakyStore(MemoryIdempotencyRepository())
        self.loops: list[Loop] = []

    def manager(self, **config: Any) -> IdempotencyManager:
        return IdempotencyManager(IdempotencyConfig(**config), self.store, scope="billing")

    async def loop(
        self, work: GatedWork | None = None, *, config: dict[str, Any] | None = None, **options: Any
    ) -> Loop:
        """Start another loop with its own manager."""
        loop = self.kind(self.topic, self.manager(**(config or {})), work or GatedWork(), **options)
        self.loops.append(loop)
        await loop.start()
        return loop

    async def committed(self, offset: int, partition: int = 0) -> None:
        """Return once the group has committed `offset`."""
        async with asyncio.timeout(30):
            while await self.topic.committed(partition) != offset:  # noqa: ASYNC110  # the broker sends no notification
                await asyncio.sleep(0.05)


@pytest.fixture(params=KINDS)
async def bench(request: pytest.FixtureRequest, kafka: Kafka, topic_prefix: str) -> AsyncIterator[Bench]:
    bench = Bench(KINDS[request.param], Topic(kafka, f"{topic_prefix}orders"))
    yield bench
    for loop in bench.loops:
        loop.work.may_end.set()
        await loop.stop()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in KINDS:
        monkeypatch.setattr(f"integr8s_idem.integrations.{module}.pause_after", lambda _: 0.05)


def _payloads(*works: GatedWork) -> list[str]:
    return [run.payload for work in works for run in work.runs]


async def test_after_a_restart_a_duplicate_is_not_run_and_returns_the_stored_result(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"))
    work = GatedWork("receipt-1", "receipt-2", "wrong")
    first = await bench.loop(work)
    await first.ended(2)
    await first.stop()
    await bench.topic.put(("a", "1"), ("c", "3"))

    again = await bench.loop(work)
    ends = await again.ended(2)

    assert [end.value for end in ends] == ["receipt-1", "wrong"]
    assert [end.offset for end in ends] == [2, 3]
    assert _payloads(work) == ["1", "2", "3"]


async def test_an_offset_is_committed_only_after_its_record_is_handled(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"))
    work = GatedWork(held=True)
    await bench.loop(work)
    await eventually(lambda: work.runs)
    await asyncio.sleep(0.7)  # longer than a poll: an automatic commit would have happened
    assert await bench.topic.committed() == 0
    work.may_end.set()
    await bench.committed(2)


async def test_a_failed_record_is_fetched_again_before_later_ones(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"), ("c", "3"))
    work = GatedWork("one", OSError("no"), OSError("no"), "two", "three")

    loop = await bench.loop(work)
    ends = await loop.ended(5)

    assert [end.offset for end in ends] == [0, 1, 1, 1, 2]
    assert [type(end.error) for end in ends] == [type(None), OSError, OSError, type(None), type(None)]
    assert _payloads(work) == ["1", "2", "2", "2", "3"]
    assert work.attempts == [1, 1, 2, 3, 1]
    await bench.committed(3)


async def test_rules_decide_about_the_errors_of_a_loop(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "withdrawn"), ("b", "invalid"), ("c", "busy"), ("a", "withdrawn"), ("d", "last"))
    errors = {"withdrawn": KeyError("withdrawn"), "invalid": ValueError("invalid")}
    work = GatedWork(
        lambda run: OSError("busy") if run.payload == "busy" and run.attempt < 4 else errors.get(run.payload)
    )
    rules = [discard(KeyError), dead_letter(ValueError), retry(OSError, attempts=5)]

    loop = await bench.loop(work, takes_given_up=True, failures=rules, config={"max_attempts": 2})
    ends = await loop.ended(8)

    assert [(end.offset, str(end.error or end.given_up or "")) for end in ends] == [
        (0, ""),
        (1, "invalid"),
        *[(2, "busy")] * 3,
        (2, ""),
        (3, ""),
        (4, ""),
    ]
    assert _payloads(work) == ["withdrawn", "invalid", *["busy"] * 4, "last"]
    assert "failed at attempt 1 (KeyError: 'withdrawn'), discarded by a rule" in caplog.text
    await bench.committed(5)


async def test_a_rule_ends_a_loop_although_its_caller_handles_all_errors(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"), ("c", "3"))
    work = GatedWork("one", ArithmeticError("a sum does not match"), "two", "three")
    stopped = await bench.loop(work, failures=[stop(ArithmeticError)], config={"max_attempts": 1})
    await eventually(lambda: stopped.over)

    with pytest.raises(ServiceStoppedError, match=r"ArithmeticError: a sum does not match\. The rule stop"):
        await stopped.stop()

    bench.loops.remove(stopped)
    assert [type(end.error) for end in stopped.ends] == [type(None), ServiceStoppedError]
    assert await bench.topic.committed() == 1
    again = await bench.loop(work, failures=[stop(ArithmeticError)], config={"max_attempts": 1})
    await again.ended(2)
    assert _payloads(work) == ["1", "2", "2", "3"]
    await bench.committed(3)


async def test_a_failing_record_blocks_only_its_own_partition(bench: Bench) -> None:
    await bench.topic.create(2)
    await bench.topic.put(("poison", "x"), ("later", "y"))
    await bench.topic.put(*((f"other-{number}", "z") for number in range(5)), partition=1)
    work = GatedWork(lambda run: OSError("no") if run.payload == "x" else "done")
    loop = await bench.loop(work, config={"max_attempts": 1_000_000})
    await bench.committed(5, partition=1)
    assert await bench.topic.committed(0) == 0
    assert "y" not in _payloads(loop.work)


async def test_leaving_the_loop_commits_all_handled_records(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"), ("c", "3"))
    loop = await bench.loop(most=2, commit_interval=3600.0)
    await eventually(lambda: loop.over)
    await loop.stop()
    assert len(loop.ends) == 2
    assert await bench.topic.committed() == 2


async def test_a_loop_that_an_error_has_left_fetches_its_record_again_when_it_is_entered_again(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"), ("c", "3"), ("d", "4"))
    work = GatedWork("one", OSError("no"), "two", OSError("no"), "three", "four")

    loop = await bench.loop(work, is_left_by_errors=True)
    ends = await loop.ended(6)

    assert [end.offset for end in ends] == [0, 1, 1, 2, 2, 3]
    assert _payloads(work) == ["1", "2", "2", "3", "3", "4"]
    await bench.committed(4)


async def test_stopping_an_idle_loop_commits_handled_records(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"))
    loop = await bench.loop(commit_interval=3600.0)
    await loop.ended(1)
    assert await bench.topic.committed() == 0
    await loop.stop()
    assert await bench.topic.committed() == 1


async def test_an_interrupted_run_releases_its_key_and_is_not_committed(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"))
    loop = await bench.loop(GatedWork(held=True))
    await eventually(lambda: loop.work.runs)
    await loop.die()
    assert await bench.topic.committed() == 0

    work = GatedWork()
    await (await bench.loop(work)).ended(2)
    assert [(run.payload, run.attempt) for run in work.runs] == [("1", 2), ("2", 1)]


async def test_records_given_up_are_passed_to_the_callback_and_committed(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"))
    work = GatedWork(OSError("no"), OSError("still"), "two")
    loop = await bench.loop(work, takes_given_up=True, config={"max_attempts": 2})
    ends = await loop.ended(3)
    assert [str(end.error or end.given_up or end.value) for end in ends] == ["no", "still", "two"]
    assert ends[1].error is None
    await bench.committed(2)


async def test_without_a_callback_a_record_given_up_raises_and_is_not_committed(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"))
    loop = await bench.loop(GatedWork(OSError("no")), config={"max_attempts": 1})
    ends = await loop.ended(3)
    assert [type(end.error) for end in ends[:3]] == [OSError, PreviouslyFailedError, PreviouslyFailedError]
    assert {end.offset for end in ends} == {0}
    assert await bench.topic.committed() == 0


async def test_a_record_without_the_header_is_given_up_or_raised_and_never_run(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put((None, "poison"), ("b", "2"))
    strict = await bench.loop()
    ends = await strict.ended(2)
    assert {(end.offset, type(end.error)) for end in ends} == {(0, InvalidKeyError)}
    await strict.stop()
    assert await bench.topic.committed() == 0

    lenient = await bench.loop(takes_given_up=True)
    ends = await lenient.ended(2)
    assert isinstance(ends[0].given_up, InvalidKeyError)
    assert _payloads(strict.work, lenient.work) == ["2"]
    await bench.committed(2)


async def test_a_key_with_a_different_body_is_given_up(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("a", "2"))
    loop = await bench.loop(takes_given_up=True)
    ends = await loop.ended(2)
    assert isinstance(ends[1].given_up, KeyReusedError)
    assert _payloads(loop.work) == ["1"]


async def test_by_position_a_duplicate_is_different_work(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("a", "1"))
    loop = await bench.loop(key=by_position)
    await loop.ended(2)
    assert _payloads(loop.work) == ["1", "1"]


async def test_a_dropped_result_is_reported_and_its_record_committed(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("a", "1"))
    loop = await bench.loop(GatedWork("x" * 100), config={"max_result_size_bytes": 50})
    ends = await loop.ended(2)
    assert isinstance(ends[1].error, ResultDroppedError)
    assert len(loop.work.runs) == 1
    await bench.committed(2)


async def test_nothing_is_run_or_committed_while_the_store_is_down(bench: Bench) -> None:
    await bench.topic.create()
    await bench.topic.put(("a", "1"))
    bench.store.down = {"reserve"}
    loop = await bench.loop()
    ends = await loop.ended(2)
    assert {type(end.error) for end in ends} == {StoreUnavailableError}
    assert await bench.topic.committed() == 0
    assert not loop.work.runs
    bench.store.down = set()
    await bench.committed(1)
    assert len(loop.work.runs) == 1


async def test_a_skipped_record_is_committed_and_not_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped: list[int] = []

    def skip(delivery: Any) -> None:
        skipped.append(delivery.record.offset)
        delivery.skip()

    _handle_by(monkeypatch, skip)
    await bench.topic.create()
    await bench.topic.put(("a", "1"), ("b", "2"))
    loop = await bench.loop()
    await bench.committed(2)
    assert skipped == [0, 1]
    assert not loop.work.runs


async def test_a_record_neither_run_nor_skipped_ends_the_loop_and_is_not_committed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _handle_by(monkeypatch, lambda delivery: None)
    await bench.topic.create()
    await bench.topic.put(("a", "1"))
    loop = await bench.loop()
    await eventually(lambda: loop.over)
    bench.loops.clear()
    with pytest.raises(ApplicationError, match="was neither run nor skipped"):
        await loop.stop()
    assert await bench.topic.committed() == 0


def _handle_by(monkeypatch: pytest.MonkeyPatch, handle: Callable[[Any], object]) -> None:
    async def on_a_loop(self: Loop, delivery: Any) -> None:
        handle(delivery)

    monkeypatch.setattr(AiokafkaLoop, "_handle", on_a_loop)
    monkeypatch.setattr(ConfluentLoop, "_handle", lambda self, delivery: handle(delivery))


async def test_a_rebalance_while_a_record_waits_pauses_no_partition(bench: Bench) -> None:
    partitions = 4
    await bench.topic.create(partitions)
    other = bench.manager(processing_timeout_seconds=60)
    held = await other.reserve(Key.of_entry(EntryPoint.KAFKA_LOOP, "busy", name="busy"), fingerprint=None)
    assert isinstance(held, Reserved)
    await bench.topic.put(("busy", "x"))
    first = await bench.loop(config={"wait_timeout_seconds": 60})
    await eventually(lambda: bench.store.calls["reserve"] > 3)

    second = await bench.loop()
    await eventually(lambda: len(first.assigned) == len(second.assigned) == 2)
    for partition in range(partitions):
        await bench.topic.put((f"later-{partition}", str(partition)), partition=partition)
    await other.complete(held, "from another process")

    await bench.committed(2)
    for partition in range(1, partitions):
        await bench.committed(1, partition)
    assert sorted(_payloads(first.work, second.work)) == ["0", "1", "2", "3"]
    await second.stop()  # its partitions move back, and must not remain paused
    bench.loops.remove(second)
    await eventually(lambda: len(first.assigned) == partitions)
    for partition in range(partitions):
        await bench.topic.put((f"last-{partition}", "last"), partition=partition)
    await eventually(lambda: _payloads(first.work).count("last") == partitions)


async def test_each_record_is_handled_once_while_members_join_and_leave(bench: Bench) -> None:
    partitions, each = 12, 40
    await bench.topic.create(partitions)
    for partition in range(partitions):
        records = [(f"{partition}-{number}", f"{partition}-{number}") for number in range(each)]
        await bench.topic.put(*records, partition=partition)
    works = [GatedWork() for _ in range(3)]
    leaving = await bench.loop(works[0], most=100)
    await eventually(lambda: works[0].runs)  # otherwise the other member might handle everything
    staying = await bench.loop(works[1])
    await eventually(lambda: leaving.over)
    await leaving.stop()
    bench.loops.remove(leaving)
    await bench.loop(works[2])
    for partition in range(partitions):
        await bench.committed(each, partition)
    payloads = _payloads(*works)
    assert len(payloads) == len(set(payloads)) == partitions * each
    assert staying.ends


async def test_a_run_longer_than_the_session_keeps_its_group_membership(bench: Bench) -> None:
    await bench.topic.create(2)
    await bench.topic.put(("a", "1"))
    settings = {"session_timeout_ms": 2000, "heartbeat_interval_ms": 200}
    first = await bench.loop(GatedWork(held=True), settings=settings)
    await eventually(lambda: first.work.runs)
    before = first.revocations
    await asyncio.sleep(4.5)  # more than two sessions long
    first.work.may_end.set()
    await bench.committed(1)
    assert first.revocations == before
    assert len(first.work.runs) == 1


async def test_a_run_longer_than_the_poll_interval_is_handled_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    await bench.topic.create(2)
    await bench.topic.put(("a", "1"))
    settings = {"session_timeout_ms": 2000, "heartbeat_interval_ms": 200, "max_poll_interval_ms": 2500}
    first = await bench.loop(GatedWork("from the first", held=True), settings=settings)
    await eventually(lambda: first.work.runs)
    second = await bench.loop(GatedWork("from the second"), settings=settings)
    await eventually(lambda: 0 in second.assigned)
    await asyncio.sleep(2.5)  # the client checks its poll interval only occasionally
    first.work.may_end.set()

    ends = await second.ended(1)

    assert ends[0].value == "from the first"
    assert not second.work.runs
    await bench.committed(1)
    await eventually(
        lambda: first.over or (len(first.assigned) == len(second.assigned) == 1),
        state=lambda: (first.assigned, second.assigned, first.ends, second.ends),
    )
    assert not first.over  # it has rejoined the group


async def test_a_loop_waits_for_a_missing_topic(bench: Bench) -> None:
    loop = await bench.loop(settings={"metadata_max_age_ms": 500})
    await asyncio.sleep(1)
    assert not loop.over


def in_a_transaction(topic: Topic, *names: str, abort: bool = False) -> None:
    """Send records to the first partition, followed by a marker."""
    producer = Producer({"bootstrap.servers": topic.kafka.bootstrap, "transactional.id": f"{topic.name}.{names}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for name in names:
        producer.produce(topic.name, name.encode(), partition=0, headers=[("event_id", name.encode())])
    assert producer.flush(30) == 0
    if abort:
        producer.abort_transaction(30)
    else:
        producer.commit_transaction(30)


READ_COMMITTED: dict[str, Any] = {"isolation_level": "read_committed"}


def settings_of(bench: Bench) -> dict[str, Any]:
    """Return settings for loops to detect the end of a partition; librdkafka reports it only if enabled."""
    return READ_COMMITTED if bench.kind is AiokafkaLoop else {**READ_COMMITTED, "enable_partition_eof": True}


async def test_the_group_commits_the_markers_at_the_end_of_a_partition(bench: Bench) -> None:
    await bench.topic.create()
    work = GatedWork()
    loop = await bench.loop(work, settings=settings_of(bench))

    await asyncio.to_thread(in_a_transaction, bench.topic, "a", "b")
    await bench.committed(3)
    await asyncio.to_thread(in_a_transaction, bench.topic, "c", "d", abort=True)
    await bench.committed(6)
    await bench.topic.put(("e", "e"))
    await bench.committed(7)

    assert _payloads(work) == ["a", "b", "e"]
    assert len(loop.ends) == 3


async def test_the_group_does_not_pass_a_marker_while_a_record_before_it_fails(bench: Bench) -> None:
    await bench.topic.create()
    await asyncio.to_thread(in_a_transaction, bench.topic, "a", "b")
    work = GatedWork("one", *[OSError("no")] * 12, "two")

    loop = await bench.loop(work, config={"max_attempts": 20}, settings=settings_of(bench))
    await loop.ended(8)
    await bench.committed(1)
    assert await bench.topic.committed() == 1
    await loop.ended(14)

    await bench.committed(3)


async def test_a_loop_commits_a_marker_after_the_records_of_the_previous_loop(bench: Bench) -> None:
    await bench.topic.create()
    await asyncio.to_thread(in_a_transaction, bench.topic, "a")
    first = await bench.loop(most=1, settings=READ_COMMITTED)
    await first.ended(1)
    await first.stop()
    assert await bench.topic.committed() == 1

    await bench.loop(settings=settings_of(bench))

    await bench.committed(2)
