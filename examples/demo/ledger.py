"""What the platform's database says, read with plain SQL and nothing of the platform's own code."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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

    def __init__(self, path: Path) -> None:
        self._path = path

    def progress(self) -> Progress:
        return Progress(
            scheduled=self._rows("SELECT count(*) FROM executions WHERE state IN ('running', 'finished')")[0][0],
            running=self._rows("SELECT count(*) FROM pods WHERE state = 'running'")[0][0],
            done=self._rows("SELECT count(*) FROM results")[0][0],
        )

    def in_flight(self) -> frozenset[str]:
        """The executions that a k8s worker has taken and not ended."""
        return frozenset(row[0] for row in self._rows("SELECT execution_id FROM pods WHERE state = 'running'"))

    def attempts(self) -> dict[str, int]:
        """Of each execution the attempt that ran last, as the k8s worker was told by its guard."""
        return dict(self._rows("SELECT execution_id, attempt FROM pods"))

    def results(self) -> dict[str, list[str]]:
        """Of each execution the status of every result that is stored."""
        found: dict[str, list[str]] = {}
        for execution_id, status in self._rows("SELECT execution_id, status FROM results"):
            found.setdefault(execution_id, []).append(status)
        return found

    def _rows(self, query: str) -> list[Any]:
        with closing(sqlite3.connect(self._path, timeout=10)) as connection:
            connection.execute("PRAGMA query_only = ON")
            return connection.execute(query).fetchall()
