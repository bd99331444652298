"""DynamoDB Local, the emulator by AWS, started from its jars on a free loopback port.

    with DynamoServer() as server:
        async with dynamo_client(server.settings()) as client:
            ...

It keeps its tables in memory. It supports conditions, answers like DynamoDB, and limits the size of items. It does not
throttle, does not check credentials, and deletes expired items at an unspecified time.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from integr8s_idem.config import DynamodbStoreSettings
from integr8s_idem.embedded.child_server import ChildServer
from tests.support.kafka.broker import ToolsMissingError, find_java
from tests.support.pausing import pause
from tests.support.ports import reserve_port

JARS: Final = Path(__file__).parents[3] / ".cache" / "dynamodb" / "libs"
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "canary",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""DynamoDB Local accepts any credentials, but requires some."""

_START_SECONDS: Final = 60.0
_JVM: Final = ("-Xshare:auto", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_MAIN: Final = "com.amazonaws.services.dynamodbv2.local.main.ServerRunner"


def missing_jars() -> str:
    """Return why no DynamoDB Local can be started here; empty if one can."""
    if not any(JARS.glob("DynamoDBLocal-*.jar")):
        return "no jars of DynamoDB Local: run `make dynamodb`"
    try:
        find_java()
    except ToolsMissingError as error:
        return str(error)
    return ""


class DynamoServer:
    """A server process. All methods block."""

    def __init__(self) -> None:
        """Raise `ToolsMissingError` if Java or the jars are missing."""
        if missing := missing_jars():
            raise ToolsMissingError(missing)
        self.port = reserve_port()
        self._folder = tempfile.TemporaryDirectory(prefix="idem-dynamodb-")
        folder = Path(self._folder.name)
        command = [find_java(), *_JVM, f"-Djava.library.path={JARS}", "-cp", f"{JARS}/*", _MAIN]
        self._server = ChildServer(
            [*command, "-inMemory", "-disableTelemetry", "-port", str(self.port)],
            folder=folder,
            log=folder / "server.log",
        )

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, **others: Any) -> DynamodbStoreSettings:
        """Return settings for a client of this server."""
        return DynamodbStoreSettings.model_validate(
            {"kind": "dynamodb", "region": "eu-central-1", "endpoint_url": self.url, **others}
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        self._server.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._answers():
            if not self._server.running or time.monotonic() > deadline:
                words = self._server.last_words()
                self._server.kill()
                raise RuntimeError(f"DynamoDB Local does not answer at {self.url}:\n{words}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server and delete its tables."""
        self._server.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """Send SIGKILL; `start` restarts the server on the same port, without tables."""
        self._server.kill()

    def stop_signal(self) -> None:
        """Pause the server: it accepts connections without answering."""
        pause(self.pid)

    def continue_signal(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url, timeout=2):
                return True
        except urllib.error.HTTPError as refusal:
            refusal.close()  # a running server rejects unsigned requests
            return True
        except OSError:
            return False
