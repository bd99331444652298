"""Entries of loops over a real Kafka: the broker is their sender, and gives again what is not committed."""

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
        Sees.GIVEN_UP: "handed to `given_up`, committed",
        Sees.REUSED: "handed to `given_up`, committed",
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
        self._last += 1  # before it is there: it may be done before we hear of it
        assert await self._topic.put((key, payload)) == self._last
        return await self._next()

    async def again(self, key: str, payload: str = "p") -> Answer:
        if self._loop.over:
            await self.open()
        return await self._next()

    async def _next(self) -> Answer:
        """The end of the next delivery."""
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
    label = "a loop of aiokafka"
    kind = AiokafkaLoop


class Confluent(KafkaLoop):
    name = "confluent"
    label = "a loop of confluent-kafka"
    kind = ConfluentLoop
    in_threads = True
    words: ClassVar[Any] = {**KafkaLoop.words, Sees.CANCELLED: "`KeyboardInterrupt`"}
