"""Entry points of consumer loops on real Kafka: the broker is the sender and redelivers uncommitted messages."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from integr8s_idem.errors import KeyReusedError
from tests.entry_points.entry import Answer, Entry, Process, Sees, answer_of
from tests.support.conditions import eventually
from tests.support.loops import AiokafkaLoop, ConfluentLoop, End, Loop, Topic


class KafkaLoop(Entry):
    needs_kafka = True
    kind: ClassVar[type[Loop]]
    words: ClassVar = {
        Sees.GIVEN_UP: "passed to `given_up`, committed",
        Sees.REUSED: "passed to `given_up`, committed",
        Sees.DROPPED: "`ResultDroppedError`, committed",
        Sees.VALUE: "the value, committed",
    }

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        assert process.kafka is not None
        self._topic = Topic(process.kafka, process.place)
        self._last = -1
        self._read = 0

    async def open(self) -> None:
        self._loop = self.kind(
            self._topic, self.manager, self.work, takes_given_up=True, settings={"session_timeout_ms": 2000}
        )
        self._read = 0
        await self._loop.start()

    async def close(self) -> None:
        await self._loop.stop()

    async def send(self, key: str, payload: str = "p") -> Answer:
        self._last += 1  # before publishing: the message may be processed before `put` returns
        assert await self._topic.put((key, payload)) == self._last
        return await self._next()

    async def retry(self, key: str, payload: str = "p") -> Answer:
        if self._loop.over:
            await self.open()
        return await self._next()

    async def _next(self) -> Answer:
        """Return the answer to the next delivery."""
        await eventually(lambda: len(self._loop.ends) > self._read or self._loop.over)
        if len(self._loop.ends) == self._read:
            return Answer(Sees.CANCELLED)
        self._read += 1
        return _answer_to(self._loop.ends[self._read - 1])

    async def cancel(self, sending: asyncio.Task[Answer]) -> None:
        await self._loop.die()

    async def acknowledged(self) -> bool:
        return await self._topic.committed() > self._last


def _answer_to(end: End) -> Answer:
    if end.error is not None:
        return answer_of(end.error)
    if end.given_up is not None:
        return Answer(Sees.REUSED if isinstance(end.given_up, KeyReusedError) else Sees.GIVEN_UP)
    return Answer(Sees.VALUE, end.value)


class Aiokafka(KafkaLoop):
    name = "aiokafka"
    label = "aiokafka loop"
    kind = AiokafkaLoop


class Confluent(KafkaLoop):
    name = "confluent"
    label = "confluent-kafka loop"
    kind = ConfluentLoop
    in_threads = True
    words: ClassVar[Any] = {**KafkaLoop.words, Sees.CANCELLED: "`KeyboardInterrupt`"}
