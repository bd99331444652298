"""The real `EventPublisher` with a producer that may lose replies."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiokafka.errors import KafkaConnectionError, RequestTimedOutError

from integr8s_idem.config import KafkaSettings
from integr8s_idem.telemetry import Observer
from integr8s_idem.worker.publisher import EventPublisher
from tests.simulation.broker import Broker
from tests.simulation.network import Channel, SilenceError
from tests.simulation.processes import PROCESS, Process


class SimulatedProducer:
    """A simulated `AIOKafkaProducer`."""

    def __init__(self, broker: Broker) -> None:
        process = PROCESS.get()
        assert process is not None
        self._process: Process = process
        self._broker = broker
        self._channel = Channel()

    async def send(
        self, topic: str, *, value: bytes | None, key: bytes | None, headers: Sequence[tuple[str, bytes]]
    ) -> asyncio.Future[Any]:
        def take() -> Any:
            if self._broker.refusing or self._process.cut_off:
                raise KafkaConnectionError("no broker")
            appended = self._broker.append(topic, key, value, headers)
            if ".retry." in topic and self._broker.when_copied is not None:
                self._broker.when_copied(self._process)
            return appended

        return asyncio.ensure_future(self._confirm(take))

    async def _confirm(self, take: Any) -> Any:
        try:
            return await self._broker.network.ask(take, 1.0, self._channel)
        except SilenceError:
            raise RequestTimedOutError from None

    async def stop(self) -> None:
        await asyncio.sleep(0.001)


class SimulatedPublisher(EventPublisher):
    """A publisher that connects to the simulated broker."""

    def __init__(self, settings: KafkaSettings, observer: Observer, broker: Broker) -> None:
        super().__init__(settings, observer)
        self._broker = broker

    async def _connected(self) -> Any:
        producer: Any = self._producer or SimulatedProducer(self._broker)
        self._producer = producer
        return producer
