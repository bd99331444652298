"""A worker process: the real manager, dispatcher and worker with a simulated store and broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from integr8s_idem.config import KafkaSettings
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import BrokerUnavailableError, ServiceStoppedError
from integr8s_idem.handlers.dispatcher import IdempotentEventDispatcher
from integr8s_idem.worker import ServiceWorker
from integr8s_idem.worker.kafka_protocols import Consumer
from tests.simulation.consumer import SimulatedConsumer
from tests.simulation.failing import OF_SETTINGS
from tests.simulation.history import SimulatedObserver
from tests.simulation.processes import Process, spawn
from tests.simulation.producer import SimulatedPublisher
from tests.simulation.store import SimulatedStoreClient
from tests.simulation.workload import SCOPE, VERSIONS, make_router

if TYPE_CHECKING:
    from tests.simulation.world import World


class Worker:
    """A worker process; a restart creates another one."""

    def __init__(self, world: World, name: str, ahead: float, version: int) -> None:
        """`version`: that of its code, as an index of `VERSIONS`."""
        self.process = Process(name)
        self.consumer: SimulatedConsumer | None = None
        self.client: SimulatedStoreClient | None = None
        self.ended = False
        self.at_once = False
        """Whether it ended without leaving its group."""
        self.read: frozenset[str] | None = None
        """The topics that existed when it last looked for its retry topics; `None` if it has not seen them."""
        self.is_stopping = False
        self._world = world
        self._ahead = ahead
        self._version = version
        self._service: ServiceWorker | None = None
        self._main = spawn(self.process, self._run())

    def stop(self) -> None:
        self.is_stopping = True
        if self._service is not None and not self.process.dead:
            self._service.stop()

    def stop_at_once(self) -> None:
        if not self.process.dead and not self._main.done():
            self._main.cancel()

    def when_it_ends(self, call: Callable[[], object]) -> None:
        """Call a function when this process has ended without a fault."""
        self._main.add_done_callback(lambda _: call())

    def _join(self, *_: object) -> Consumer:
        self.consumer = SimulatedConsumer(self._world.broker)
        return self.consumer

    async def _list_topics(self, settings: KafkaSettings, wanted: Collection[str]) -> Collection[str]:
        broker = self._world.broker
        await asyncio.sleep(broker.random.uniform(0.01, 0.2))
        if broker.refusing or self.process.cut_off:
            raise BrokerUnavailableError("the simulated broker", "connection refused")
        self.read = frozenset(broker.topics)
        return self.read

    def lacks_topics(self) -> bool:
        """Return whether it must be restarted to read all retry topics."""
        return self.read is not None and not self.read >= self._world.broker.topics

    async def _run(self) -> None:
        world, setup = self._world, self._world.setup
        observer = SimulatedObserver(world.history)
        client = self.client = SimulatedStoreClient(world.server, world.store_network, self._ahead)
        client.on_schedule = world.note_schedule
        manager = IdempotencyManager(setup.config, client, observer, scope=SCOPE, owner=self.process.name)
        publisher = SimulatedPublisher(setup.kafka, observer, world.broker)
        overtaking = world.habits.overtaking
        router = make_router(
            VERSIONS[self._version],
            reconciles=bool(world.history.reconciles),
            overtaken=overtaking.handlers if overtaking is not None else frozenset(),
        )
        dispatcher = IdempotentEventDispatcher(
            router, manager, invoke=world.handlers, publisher=publisher, failures=OF_SETTINGS
        )
        self._service = ServiceWorker(
            SCOPE,
            dispatcher,
            publisher,
            setup.kafka,
            setup.service,
            consumer=self._join,
            replay=overtaking.replay if overtaking is not None else None,
            list_topics=self._list_topics,
        )
        if self.is_stopping:
            self._service.stop()
        try:
            try:
                await self._service.run()
            except ServiceStoppedError:
                world.history.counts["rule_stops"] += 1
                world.history.note("stopped by a rule")
            await publisher.close()
            await manager.close()
        except asyncio.CancelledError:
            self.at_once = True
            world.history.note("stopped at once")
        except Exception as error:  # noqa: BLE001  # a promise too: a worker does not fail by itself
            world.history.violate("U", f"a worker failed: {error!r}")
        self.ended = True
        world.history.note("ended")
