"""A Kafka cluster of three broker processes, small enough for a laptop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from aiokafka.admin import AIOKafkaAdminClient

from tests.support.kafka.broker import Kafka, KafkaBroker
from tests.support.ports import reserve_port

_REPLICATED: Final = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "replica.lag.time.max.ms": "3000",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
}


class KafkaCluster(Kafka):
    """Brokers 1, 2 and 3, which are controllers as well."""

    replicas: ClassVar[int] = 3

    def __init__(self, folder: Path) -> None:
        """Format three data folders in `folder`. Raises `ToolsMissingError`."""
        ports = [reserve_port() for _ in range(6)]
        controllers = ports[3:]
        voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in enumerate(controllers, start=1))
        self.brokers: dict[int, KafkaBroker] = {}
        for node, (port, controller) in enumerate(zip(ports[:3], controllers, strict=True), start=1):
            own = folder / f"broker-{node}"
            own.mkdir()
            self.brokers[node] = KafkaBroker(own, self._settings(node, voters), ports=(port, controller), heap="320m")
        super().__init__(",".join(broker.bootstrap for broker in self.brokers.values()))

    @staticmethod
    def _settings(node: int, voters: str) -> Mapping[str, str]:
        return {**_REPLICATED, "node.id": str(node), "controller.quorum.voters": voters}

    def start(self) -> None:
        """Start all brokers and wait until they serve clients."""
        for broker in self.brokers.values():
            broker.launch()
        for broker in self.brokers.values():
            broker.wait_until_it_serves()

    def kill(self) -> None:
        """Send SIGKILL to all brokers."""
        for broker in self.brokers.values():
            broker.kill()

    async def coordinator_of(self, group: str) -> int:
        """Return the broker that coordinates `group`."""
        admin: Any = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        await admin.start()
        try:
            return int(await admin.find_coordinator(group))
        finally:
            await admin.close()
