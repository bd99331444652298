"""A real PostgreSQL for a test: an `EmbeddedPostgres` that can crash.

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
    """A server process with a database `postgres`. All methods block."""

    def __init__(self, *, keeps_commits: bool = False, connections: int = 60) -> None:
        """Prepare a server.

        Args:
            keeps_commits: Whether commits survive `crash`; a little slower.
            connections: Maximum number of connections.
        """
        super().__init__()
        commits = "on" if keeps_commits else "off"
        self.settings = {**self.settings, "synchronous_commit": commits, "max_connections": str(connections)}

    def crash(self) -> None:
        """Stop the server like a crash and keep its data for `start_again`."""
        server = self._running()
        server.signal(signal.SIGQUIT)  # PostgreSQL's immediate shutdown, which recovers at the next start
        until = time.monotonic() + 10
        while server.running:
            assert time.monotonic() < until, "the server does not stop"
            time.sleep(0.01)
        server.kill()

    def start_again(self) -> None:
        """Start the server with its previous data."""
        self._serve()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
