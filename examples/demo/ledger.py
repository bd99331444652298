"""What the platform's database says, read with plain SQL and nothing of the platform's own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import NullPool, text
from sqlalchemy.ext.asyncio import create_async_engine


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the executions are."""

    scheduled: int = 0
    """Those that have or had a slot."""
    running: int = 0
    """Those that a k8s worker has taken and not ended."""
    done: int = 0
    """Those with a stored result."""


class Ledger:
    """Reads; never writes."""

    def __init__(self, database_url: str) -> None:
        # A connection for each look: whoever counts is no part of what is counted.
        self._engine = create_async_engine(database_url, poolclass=NullPool)

    async def progress(self) -> Progress:
        [counts] = await self._rows(
            "SELECT (SELECT count(*) FROM executions WHERE state IN ('running', 'finished')), "
            "(SELECT count(*) FROM pods WHERE state = 'running'), (SELECT count(*) FROM results)"
        )
        return Progress(*counts)

    async def in_flight(self) -> frozenset[str]:
        """The executions that a k8s worker has taken and not ended."""
        return frozenset(row[0] for row in await self._rows("SELECT execution_id FROM pods WHERE state = 'running'"))

    async def attempts(self) -> dict[str, int]:
        """Of each execution the attempt that ran last, as the k8s worker was told by its guard."""
        return {row[0]: row[1] for row in await self._rows("SELECT execution_id, attempt FROM pods")}

    async def results(self) -> dict[str, list[str]]:
        """Of each execution the status of every result that is stored."""
        found: dict[str, list[str]] = {}
        for execution_id, status in await self._rows("SELECT execution_id, status FROM results"):
            found.setdefault(execution_id, []).append(status)
        return found

    async def _rows(self, query: str) -> list[Any]:
        async with self._engine.connect() as connection:
            return list((await connection.execute(text(query))).all())
