"""A line for every change that people make by hand: who, when, what, and what came of it.

One JSON object a line, in ASCII, appended and flushed to the disk.  A command writes `begun` before it touches
anything, and refuses to go on where that fails; so a change without a line cannot be.  `ended` follows with what was
counted, or `failed: …`, or `interrupted`; a `begun` with nothing behind it was killed.
"""

from __future__ import annotations

import errno
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
from typing import Any, Final
from uuid import uuid4

from integr8s_idem.config import Settings
from integr8s_idem.config.message_text import text_of
from integr8s_idem.config.urls import redacted
from integr8s_idem.errors import ApplicationError

_ADDRESS: Final = {"kind", "url", "urls", "sentinels", "path", "table", "region", "endpoint_url"}
"""Settings of a store that say where it is."""

STANDARD_ERROR: Final = "-"
"""In place of a file's name: lines go to standard error, for those who collect that."""


@dataclass
class Entry:
    """What a command reports while it runs; `counts` stands in its last line."""

    counts: dict[str, Any] = field(default_factory=dict)


def audit_file() -> Path:
    """Where lines go if nobody says otherwise: `integr8s-idem/audit.jsonl` below the folder for state.

    That is `XDG_STATE_HOME`, or `~/.local/state` (XDG Base Directory Specification, which has relative ones ignored).

    Raises:
        OSError: This user has no home.
    """
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise OSError(str(error)) from error
    return state / "integr8s-idem" / "audit.jsonl"


def store_place(settings: Settings) -> dict[str, Any]:
    """Which store a change is made in, fit for an audit line: its kind, its address without credentials, the prefix."""
    store = settings.store.model_dump(mode="json", include=_ADDRESS, exclude_none=True)
    return {**store, "key_prefix": settings.idempotency.key_prefix}


@contextmanager
def audited(command: str, asked: Mapping[str, Any], file: str | None = None) -> Iterator[Entry]:
    """Write a line before the block and one behind it, however that ends.

    Args:
        command: As people type it: `keys release`.
        asked: What it is to do it to, fit for JSON; no payload.
        file: Its name, `-` for standard error, or `None` for `audit_file()`.

    Raises:
        ApplicationError: A line cannot be written.  The first: the block does not run.  The last: it has run.
    """
    told = {"run": uuid4().hex, "command": command, **_who(), "asked": dict(asked)}
    try:
        _append(file, {"at": _now(), "says": "begun", **told})
    except OSError as error:
        raise ApplicationError(
            f"nothing was changed: no audit line can be written ({error}); name another file with --audit-file, "
            f"or {STANDARD_ERROR} for standard error"
        ) from error
    entry = Entry()
    try:
        yield entry
    except BaseException as error:
        how = (
            f"failed: {type(error).__name__}: {redacted(text_of(error))}"
            if isinstance(error, Exception)
            else "interrupted"
        )
        try:
            _append(file, {"at": _now(), "says": how, **told, "counts": entry.counts})
        except OSError as fault:
            # What went wrong first is what is raised.
            error.add_note(f"and no audit line can be written of that any more ({fault}): {entry.counts}")
        raise
    try:
        _append(file, {"at": _now(), "says": "ended", **told, "counts": entry.counts})
    except OSError as error:
        raise ApplicationError(
            f"it was done, but its last audit line cannot be written ({error}); what that would say: "
            f"{json.dumps(entry.counts)}"
        ) from error


def _append(file: str | None, line: Mapping[str, Any]) -> None:
    text = json.dumps(line) + "\n"
    if file == STANDARD_ERROR:
        sys.stderr.write(text)
        sys.stderr.flush()
        return
    path = Path(file) if file else audit_file()
    # For this user alone; what is there keeps its rights.
    for folder in reversed([each for each in path.parents if not each.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)
    audit = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        _write(audit, text.encode())
    finally:
        os.close(audit)


def _write(audit: int, line: bytes) -> None:
    # In one call, so that lines of two commands do not mix.
    written = os.write(audit, line)
    if written < len(line):
        # The disk is full, or nearly so: half a line is none, and the next one must not be part of it.
        os.write(audit, b"\n")
        raise OSError(f"only {written} of {len(line)} bytes could be written")
    try:
        os.fsync(audit)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a pipe, or a device: there is no disk behind it
            raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _who() -> dict[str, str]:
    """By the system rather than the environment, which anybody can set; who used sudo is told by sudo."""
    who = {"user": _user(), "host": socket.gethostname()}
    through = os.environ.get("SUDO_USER")
    return {**who, "sudo_user": through} if through else who


def _user() -> str:
    if sys.platform == "win32":
        return getpass.getuser()
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container whose user has no name
        return str(os.getuid())
