"""A real PostgreSQL for a test: that of `EmbeddedPostgres`, which can crash.

with PostgresServer() as server:
    database = Database(server.url)
"""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Self

from integr8s_idem.embedded.postgres_server import EmbeddedPostgres


class PostgresServer(EmbeddedPostgres):
    """One server process with one database, `postgres`.  All methods block."""

    def __init__(self, *, keeps_commits: bool = False, connections: int = 60) -> None:
        """`keeps_commits`: what was committed survives `crash`; a little slower.  `connections`: at most."""
        super().__init__()
        commits = "on" if keeps_commits else "off"
        self.settings = {**self.settings, "synchronous_commit": commits, "max_connections": str(connections)}

    def crash(self) -> None:
        """End it at once, as a crash does, and keep its data; `start_again` brings it back."""
        server = self._running()
        server.signal(signal.SIGQUIT)  # PostgreSQL's immediate shutdown: recovery at the next start
        until = time.monotonic() + 10
        while server.running:
            assert time.monotonic() < until, "it does not end"
            time.sleep(0.01)
        server.kill()

    def start_again(self) -> None:
        """Start it on the data that it had."""
        self._serve()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
