"""Read the platform's database with plain SQL, independently of the platform's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import create_async_engine


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the executions."""

    scheduled: int = 0
    """Executions that have or had a slot."""
    running: int = 0
    """Executions that a k8s worker has started and not ended."""
    done: int = 0
    """Executions with a stored result."""


class Ledger:
    """Read-only access to the platform's database."""

    def __init__(self, database_url: str) -> None:
        # A new connection for each query, so that the demo does not hold connections.
        self._engine = create_async_engine(database_url, poolclass=NullPool)

    async def progress(self) -> Progress:
        [counts] = await self._rows(
            "SELECT (SELECT count(*) FROM executions WHERE state IN ('running', 'finished')), "
            "(SELECT count(*) FROM pods WHERE state = 'running'), (SELECT count(*) FROM results)"
        )
        return Progress(*counts)

    async def in_flight(self) -> frozenset[str]:
        """Return the executions that a k8s worker has started and not ended."""
        return frozenset(row[0] for row in await self._rows("SELECT execution_id FROM pods WHERE state = 'running'"))

    async def attempts(self) -> dict[str, int]:
        """Return the last attempt of each execution, as reported to the k8s worker by its guard."""
        return {row[0]: row[1] for row in await self._rows("SELECT execution_id, attempt FROM pods")}

    async def results(self) -> dict[str, list[str]]:
        """Return the status of every stored result, by execution."""
        found: dict[str, list[str]] = {}
        for execution_id, status in await self._rows("SELECT execution_id, status FROM results"):
            found.setdefault(execution_id, []).append(status)
        return found

    async def _rows(self, query: str) -> list[Any]:
        async with self._engine.connect() as connection:
            return list((await connection.execute(text(query))).all())
