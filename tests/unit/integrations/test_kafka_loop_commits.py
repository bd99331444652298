"""Commits of consumer loops that fail, without a broker."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import confluent_kafka
import pytest
from aiokafka.errors import CommitFailedError, TopicAuthorizationFailedError

from integr8s_idem.integrations import aiokafka, confluent
from integr8s_idem.integrations.confluent_offsets import Offsets
from tests.support.conditions import eventually
from tests.support.fake_loop_consumers import TOPIC, FakeAiokafka, FakeConfluent
from tests.support.guarded import plain_manager

TIMED_OUT = confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError.REQUEST_TIMED_OUT))


class ConfluentCommits:
    """A confluent-kafka loop in a thread that skips all messages."""

    def __init__(self, *, commit_interval: float) -> None:
        self.consumer: Any = FakeConfluent(3)
        self.consumer.commit_errors = [TIMED_OUT]
        self._stop = threading.Event()
        self._interval = commit_interval
        self._thread = asyncio.create_task(asyncio.to_thread(self._consume))

    def _consume(self) -> None:
        interval = self._interval
        for delivery in confluent.guarded(self.consumer, plain_manager(), stop=self._stop, commit_interval=interval):
            delivery.skip()

    async def stop(self) -> None:
        self._stop.set()
        await self._thread


class AiokafkaCommits:
    """An aiokafka loop that skips all records."""

    def __init__(self, error: BaseException | None = None, *, commit_interval: float) -> None:
        self.consumer: Any = FakeAiokafka(3)
        self.consumer.commit_errors = [error or TopicAuthorizationFailedError()]
        self._interval = commit_interval
        self._task = asyncio.create_task(self._consume())

    async def _consume(self) -> None:
        deliveries = aiokafka.guarded(self.consumer, plain_manager(), commit_interval=self._interval)
        async with aclosing(deliveries):
            async for delivery in deliveries:
                delivery.skip()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


KINDS: list[Any] = [ConfluentCommits, AiokafkaCommits]


@pytest.mark.parametrize("kind", KINDS)
async def test_offsets_of_a_failed_commit_are_part_of_the_next_one(kind: Any) -> None:
    loop = kind(commit_interval=0.05)
    await eventually(lambda: loop.consumer.commits)
    await loop.stop()
    assert loop.consumer.commits[-1] == 3


@pytest.mark.parametrize("kind", KINDS)
async def test_offsets_of_a_failed_commit_are_committed_when_the_loop_is_left(kind: Any) -> None:
    loop = kind(commit_interval=0.5)
    await eventually(lambda: not loop.consumer.commit_errors)
    await loop.stop()
    assert loop.consumer.commits == [3]


@pytest.mark.parametrize(("kind", "enough"), [(ConfluentCommits, 1), (AiokafkaCommits, 4)])
async def test_offsets_of_a_failed_commit_are_dropped_if_their_partition_is_revoked(kind: Any, enough: int) -> None:
    loop = kind(commit_interval=0.05)
    consumer = loop.consumer
    failures = consumer.commit_errors = consumer.commit_errors * 1000
    await eventually(lambda: len(failures) < 1000)
    looks = list[None]()

    def assignment() -> Any:
        looks.append(None)
        return type(consumer).assignment(consumer)

    consumer.is_assigned = False
    consumer.current_position = consumer.messages = 0  # nothing is committed: this is the position once reassigned
    consumer.assignment = assignment
    await eventually(lambda: len(looks) >= enough)  # the aiokafka loop also looks for transaction markers
    failures.clear()
    consumer.is_assigned = True
    await loop.stop()

    assert not consumer.commits


async def test_an_aiokafka_loop_does_not_repeat_a_commit_while_the_group_rebalances() -> None:
    loop = AiokafkaCommits(CommitFailedError(), commit_interval=0.5)
    await eventually(lambda: not loop.consumer.commit_errors)
    await loop.stop()
    assert not loop.consumer.commits


async def test_offsets_of_a_cancelled_commit_are_committed_when_the_loop_is_left() -> None:
    loop = AiokafkaCommits(asyncio.CancelledError(), commit_interval=0.5)
    await eventually(lambda: loop.consumer.commits)
    assert loop.consumer.commits == [3]
    await loop.stop()


def test_only_partitions_whose_commit_failed_are_committed_again() -> None:
    consumer: Any = FakeConfluent(0)
    commits = list[list[tuple[int, int]]]()
    failing = {0}

    def partition(number: int, offset: int) -> Any:
        return confluent_kafka.TopicPartition(TOPIC, number, offset)

    class End:
        """A report of the end of a partition."""

        def __init__(self, number: int, offset: int) -> None:
            self.topic = lambda: TOPIC
            self.partition = lambda: number
            self.offset = lambda: offset
            self.error = lambda: confluent_kafka.KafkaError(confluent_kafka.KafkaError._PARTITION_EOF)

    class Result:
        """The result of a commit for one partition."""

        def __init__(self, at: Any) -> None:
            self.topic, self.partition = at.topic, at.partition
            self.error = TIMED_OUT.args[0] if at.partition in failing else None

    def commit(*, offsets: Any, asynchronous: bool) -> Any:
        commits.append([(each.partition, each.offset) for each in offsets])
        return [Result(each) for each in offsets]

    consumer.assignment = lambda: [partition(0, 0), partition(1, 0)]
    consumer.commit = commit
    offsets = Offsets(consumer, 0.0)
    for number in 0, 1:
        offsets.note_end(End(number, 5))  # type: ignore[arg-type]
    offsets.commit()
    offsets.commit()
    offsets.note_end(End(0, 9))  # type: ignore[arg-type]
    failing.clear()
    offsets.commit()
    offsets.commit()

    assert commits == [[(0, 5), (1, 5)], [(0, 5)], [(0, 9)]]
