"""Apache Kafka, started from its jars on free loopback ports with a freshly formatted data folder."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from integr8s_idem.embedded.child_server import ChildServer
from tests.support.ports import reserve_port

JARS = Path(__file__).parents[3] / ".cache" / "kafka" / "libs"
OLDEST_JAVA = 17
START_SECONDS = 60.0
STOP_SECONDS = 15.0

_CLUSTER_ID = "aW50ZWdyOHMtaWRlbS10cw"
_JVM = (
    "-Xshare:auto",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dlog4j2.level=off",
)
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "true",
    "num.partitions": "1",
    "default.replication.factor": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.num.partitions": "1",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "log.cleaner.enable": "false",
    "log.segment.bytes": "16777216",
    "log.index.size.max.bytes": "1048576",
    "num.network.threads": "1",
    "num.io.threads": "2",
    "num.replica.fetchers": "1",
    "background.threads": "2",
    "broker.heartbeat.interval.ms": "200",
    # A restarted broker can register only after the session of its former process has expired: nine seconds by default.
    "broker.session.timeout.ms": "3000",
}


class ToolsMissingError(Exception):
    """A program or jar is missing on this machine; the message says how to install it."""


class Kafka:
    """A running broker at `bootstrap`."""

    replicas: ClassVar[int] = 1
    """Of each partition of a created topic."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    @property
    def bootstrap(self) -> str:
        """host:port."""
        return self._bootstrap

    async def create_topics(self, partitions: Mapping[str, int], settings: Mapping[str, str] | None = None) -> None:
        """Create topics with the given numbers of partitions and topic settings such as `retention.ms`.

        Returns once a broker lists their leaders, which it learns some time after the controller has answered.
        """
        admin: Any = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap)
        new_topic: Any = NewTopic  # untyped in aiokafka
        await admin.start()
        try:
            topics = [
                new_topic(name, count, self.replicas, topic_configs=settings) for name, count in partitions.items()
            ]
            answer = await admin.create_topics(topics)
            refused = [error for error in answer.topic_errors if error[1]]
            assert not refused, f"not created: {refused}"
            async with asyncio.timeout(START_SECONDS):
                while not set(partitions) <= await _led_topics(admin):  # noqa: ASYNC110  # brokers send no notification
                    await asyncio.sleep(0.02)
        finally:
            await admin.close()


async def _led_topics(admin: Any) -> set[str]:
    """Return the topics whose partitions all have a leader."""
    topics = await admin.describe_topics()
    return {
        topic["topic"]
        for topic in topics
        if not topic["error_code"] and all(partition["leader"] >= 0 for partition in topic["partitions"])
    }


class KafkaBroker(Kafka):
    """A broker with one node, data and log in `folder`, and ports that do not change with a restart."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        *,
        ports: tuple[int, int] | None = None,
        heap: str = "512m",
    ) -> None:
        """Format the data folder.

        Args:
            folder: An empty folder; the caller deletes it after the last `kill` or `stop`.
            settings: Broker settings in addition to those for fast tests.
            ports: Ports for clients and controllers; reserved ones by default.
            heap: Memory of the Java process for `-Xmx`.

        Raises:
            ToolsMissingError: No Java of `OLDEST_JAVA` or newer, or no jars.
        """
        self._java = find_java()
        self._jars = find_jars()
        self._heap = heap
        port, self._controller_port = ports or (reserve_port(), reserve_port())
        super().__init__(f"127.0.0.1:{port}")
        self._port = port
        self._properties = folder / "server.properties"
        self._properties.write_text(self._lines(folder / "data", settings or {}))
        self._server = ChildServer(
            [*self._command(), "kafka.Kafka", str(self._properties)], folder=folder, log=folder / "broker.log"
        )
        self._format()

    @property
    def pid(self) -> int:
        """Process id of the broker, which must be running."""
        return self._server.pid

    @property
    def log(self) -> Path:
        """The log file of the broker: warnings and errors."""
        return self._server.log

    def start(self) -> None:
        """Start the broker and wait until it serves clients."""
        self.launch()
        self.wait_until_it_serves()

    def launch(self) -> None:
        """Start the broker without waiting."""
        self._server.start()

    def wait_until_it_serves(self) -> None:
        """Return once the broker serves clients."""
        deadline = time.monotonic() + START_SECONDS
        while not _serves(self._port):
            if not self._server.running or time.monotonic() > deadline:
                words = self._server.last_words()
                self._server.kill()
                raise RuntimeError(f"Kafka does not serve at {self.bootstrap}:\n{words}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the broker; kill it if it still runs after `STOP_SECONDS`."""
        self._server.terminate(STOP_SECONDS)

    def kill(self) -> None:
        """Send SIGKILL; port and data are kept for `start`."""
        self._server.kill()

    def restart(self) -> None:
        """Stop and start the broker with the same port and data."""
        self.stop()
        self.start()

    def _command(self) -> list[str]:
        return [self._java, f"-Xmx{self._heap}", *_JVM, "-cp", f"{self._jars}/*"]

    def _format(self) -> None:
        subprocess.run(
            [*self._command(), "kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(self._properties)],
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=START_SECONDS,
        )

    def _lines(self, data: Path, settings: Mapping[str, str]) -> str:
        places = {
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "log.dirs": str(data),
        }
        merged = {**_SETTINGS, **places, **settings}
        return "".join(f"{name}={value}\n" for name, value in merged.items())


def find_java() -> str:
    """Return Java from JAVA_HOME or the PATH."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        raise ToolsMissingError(f"no Java: install Java {OLDEST_JAVA} or newer")
    said = subprocess.run([java, "-version"], check=True, capture_output=True, text=True, timeout=30).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise ToolsMissingError(f"{java} is too old: install Java {OLDEST_JAVA} or newer")
    return java


def find_jars() -> Path:
    """Return the folder that `make kafka` downloads to."""
    if not any(JARS.glob("kafka_*.jar")):
        raise ToolsMissingError("no jars of Apache Kafka: run `make kafka`")
    return JARS


def _serves(port: int) -> bool:
    """Return whether the broker at `port` lists itself; the port is open before the broker is ready."""
    request = struct.pack(">hhihi", 3, 1, 1, -1, 0)  # Metadata v1 without topics
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as client, client.makefile("rb") as answers:
            client.sendall(struct.pack(">i", len(request)) + request)
            head = answers.read(12)
            return len(head) == 12 and struct.unpack(">iii", head)[2] > 0
    except OSError:
        return False
