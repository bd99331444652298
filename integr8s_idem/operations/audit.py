"""A line for every change that people make by hand: who, when, what, and what came of it.

One JSON object a line, appended and flushed to the disk.  A command writes `begun` before it touches anything, and
refuses to go on where that fails; so a change without a line cannot be.  `ended` follows with what was counted.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO
from uuid import uuid4

from integr8s_idem.errors import ApplicationError

STANDARD_ERROR: Final = "-"
"""In place of a file's name: lines go to standard error, for those who collect that."""


@dataclass
class Entry:
    """What a command reports while it runs; `counts` stands in its last line."""

    counts: dict[str, Any] = field(default_factory=dict)


def audit_file() -> Path:
    """Where lines go if nobody says otherwise: `integr8s-idem/audit.jsonl` below the folder for state.

    That is `XDG_STATE_HOME`, or `~/.local/state` (XDG Base Directory Specification).
    """
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "integr8s-idem" / "audit.jsonl"


@contextmanager
def audited(command: str, asked: Mapping[str, Any], file: str | None = None) -> Iterator[Entry]:
    """Write a line before the block and one behind it, however that ends.

    Args:
        command: As people type it: `keys release`.
        asked: What it is to do it to, fit for JSON; no payload.
        file: Its name, `-` for standard error, or `None` for `audit_file()`.

    Raises:
        ApplicationError: The first line cannot be written; the block does not run.
    """
    run = uuid4().hex
    told = {"run": run, "command": command, "user": _user(), "host": socket.gethostname(), "asked": dict(asked)}
    try:
        _append(file, {"at": _now(), "says": "begun", **told})
    except OSError as error:
        raise ApplicationError(
            f"nothing was changed: no audit line can be written ({error}); name another file with --audit-file, "
            f"or {STANDARD_ERROR} for standard error"
        ) from error
    entry = Entry()
    outcome = "interrupted"
    try:
        yield entry
        outcome = "ended"
    except Exception as error:
        outcome = f"failed: {type(error).__name__}: {error}"
        raise
    finally:
        _append(file, {"at": _now(), "says": outcome, **told, "counts": entry.counts})


def _append(file: str | None, line: Mapping[str, Any]) -> None:
    text = json.dumps(line, ensure_ascii=False) + "\n"
    if file == STANDARD_ERROR:
        _write(sys.stderr, text)
        return
    path = Path(file) if file else audit_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8", errors="backslashreplace") as audit:
        _write(audit, text)
        os.fsync(audit.fileno())


def _write(stream: TextIO, text: str) -> None:
    # In one call, so that lines of two commands do not mix.
    stream.write(text)
    stream.flush()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name; Python 3.13 raises the former
        return str(os.getuid())
