"""Recorded totals: one JSON file per campaign, and one for the tests that are marked with a row of the matrix."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.campaigns.figures import Figures

FOLDER: Final = Path(__file__).parent / "record"
TESTS: Final = "tests"
ROOT: Final = Path(__file__).parents[2]
LIBRARY: Final = "integr8s_idem"


@dataclass
class Record:
    """Totals of a campaign over all versions since `since`."""

    next: int = 0
    """The number of the next run."""
    figures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    since: str = ""
    until: str = ""
    """Commits of the first and the last run, as returned by `commit`."""
    violations: list[str] = field(default_factory=list)
    """Broken promises that have not been investigated yet; removed by hand after a fix."""

    def add(self, first: int, count: int, figures: Figures, seconds: float) -> None:
        """Add the figures of the successful runs `first` to `first + count - 1`."""
        total = Figures(self.figures)
        total.update(figures)
        self.figures = dict(sorted(total.items()))
        self.next = max(self.next, first + count)
        self.seconds = round(self.seconds + seconds, 1)
        self.until = commit()
        self.since = self.since or self.until


def load(name: str, folder: Path = FOLDER) -> Record:
    """Return the record of a campaign; empty if there is none."""
    path = folder / f"{name}.json"
    return Record(**json.loads(path.read_text())) if path.exists() else Record()


def save(name: str, record: Record, folder: Path = FOLDER) -> None:
    """Write the record atomically."""
    _write(folder / f"{name}.json", asdict(record))


def load_tests(folder: Path = FOLDER) -> dict[str, dict[str, int]]:
    """Return the number of passed, failed and skipped cases by test function, as last recorded."""
    path = folder / f"{TESTS}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def save_tests(outcomes: dict[str, dict[str, int]], folder: Path = FOLDER) -> None:
    """Write the outcomes by test function."""
    _write(folder / f"{TESTS}.json", dict(sorted(outcomes.items())))


def commit() -> str:
    """Return the short hash of HEAD, followed by `+` if the library has uncommitted changes.

    Returns `?` outside a repository.
    """
    name = _git("rev-parse", "--short=8", "HEAD")
    return (name + ("+" if _git("status", "--porcelain", "--", LIBRARY) else "")) or "?"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)
