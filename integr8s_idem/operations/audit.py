"""Audit lines for changes by operators: who, when, what, and the result.

Each line is a JSON object in ASCII, appended and synced to disk.  A command writes `begun` before it changes anything,
and stops if that fails, so that there is no change without a line.  `ended` follows with the counts, or `failed: …`, or
`interrupted`.  A `begun` without a later line belongs to a command that was killed.
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
"""Settings of a store that contain its address."""

STANDARD_ERROR: Final = "-"
"""Write lines to standard error instead of a file."""


@dataclass
class Entry:
    """Results that a command reports; `counts` is included in its last line."""

    counts: dict[str, Any] = field(default_factory=dict)


def audit_file() -> Path:
    """Return the default file: `integr8s-idem/audit.jsonl` in the state directory.

    That is `XDG_STATE_HOME`, or `~/.local/state`.  Relative paths are ignored, as the XDG specification requires.

    Raises:
        OSError: The user has no home directory.
    """
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        try:
            state = Path.home() / ".local" / "state"
        except RuntimeError as error:
            raise OSError(str(error)) from error
    return state / "integr8s-idem" / "audit.jsonl"


def store_place(settings: Settings) -> dict[str, Any]:
    """Return the store's kind, its address without credentials, and the key prefix, for an audit line."""
    store = settings.store.model_dump(mode="json", include=_ADDRESS, exclude_none=True)
    return {**store, "key_prefix": settings.idempotency.key_prefix}


@contextmanager
def audited(command: str, asked: Mapping[str, Any], file: str | None = None) -> Iterator[Entry]:
    """Write a line before the block and a line after it, even if it fails.

    Args:
        command: The command as typed: `keys release`.
        asked: Options of the command, JSON-serializable, without payloads.
        file: Path of the file, `-` for standard error, or `None` for `audit_file()`.

    Raises:
        ApplicationError: A line cannot be written.  For the first line, the block does not run; for the last, it has
            run.
    """
    fields = {"run": uuid4().hex, "command": command, **_who(), "asked": dict(asked)}
    try:
        _append(file, {"at": _now(), "says": "begun", **fields})
    except OSError as error:
        raise ApplicationError(
            f"nothing was changed: cannot write the audit line ({error}); choose another file with --audit-file, or "
            f"{STANDARD_ERROR} for standard error"
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
            _append(file, {"at": _now(), "says": how, **fields, "counts": entry.counts})
        except OSError as fault:
            # Raise the original error.
            error.add_note(f"the audit line cannot be written either ({fault}): {entry.counts}")
        raise
    try:
        _append(file, {"at": _now(), "says": "ended", **fields, "counts": entry.counts})
    except OSError as error:
        raise ApplicationError(
            f"the command succeeded, but its last audit line cannot be written ({error}); its counts: "
            f"{json.dumps(entry.counts)}"
        ) from error


def _append(file: str | None, line: Mapping[str, Any]) -> None:
    text = json.dumps(line) + "\n"
    if file == STANDARD_ERROR:
        sys.stderr.write(text)
        sys.stderr.flush()
        return
    path = Path(file) if file else audit_file()
    # Readable by this user only; existing folders keep their permissions.
    for folder in reversed([each for each in path.parents if not each.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)
    audit = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        _write(audit, text.encode())
    finally:
        os.close(audit)


def _write(audit: int, line: bytes) -> None:
    # A single write, so that lines of concurrent commands do not mix.
    written = os.write(audit, line)
    if written < len(line):
        # The disk is full: terminate the partial line, so that the next line stays intact.
        os.write(audit, b"\n")
        raise OSError(f"only {written} of {len(line)} bytes could be written")
    try:
        os.fsync(audit)
    except OSError as error:
        if error.errno != errno.EINVAL:  # pipes and devices cannot be synced
            raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _who() -> dict[str, str]:
    """Return user and host.  The user comes from the system, since environment variables can be set by anyone."""
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
