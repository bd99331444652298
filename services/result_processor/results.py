"""Results in the platform's database: the first result of each execution is kept."""

from __future__ import annotations

from typing import Any, Final, Literal

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from services.database import insert, now, results
from services.events import ExecutionCompleted, ExecutionFailed, ExecutionTimeout, Outcome

Status = Literal["completed", "failed", "timeout"]

_STATUS: Final[dict[type[Outcome], Status]] = {
    ExecutionCompleted: "completed",
    ExecutionFailed: "failed",
    ExecutionTimeout: "timeout",
}


class Results:
    """Writes within the caller's transaction."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def store(self, key: str, outcome: Outcome) -> Status | None:
        """Store the outcome of an execution.

        Args:
            key: Identifies the work, at most 255 characters.  The same key always returns the same answer.

        Returns:
            Its status, or `None` if other work has stored a result of this execution before.
        """
        row = _row(outcome) | {"stored_by": key, "stored_at": now()}
        await self._connection.execute(insert(self._connection, results).values(**row).on_conflict_do_nothing())
        found = select(results.c.stored_by).where(results.c.execution_id == outcome.execution_id)
        stored_by = (await self._connection.execute(found)).scalar_one()
        return _STATUS[type(outcome)] if stored_by == key else None


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "execution_id": outcome.execution_id,
        "status": _STATUS[type(outcome)],
        "exit_code": None if isinstance(outcome, ExecutionTimeout) else outcome.exit_code,
        "error_type": outcome.error_type if isinstance(outcome, ExecutionFailed) else None,
        "stdout": outcome.stdout,
        "stderr": outcome.stderr,
        **outcome.resource_usage.model_dump(),
    }
