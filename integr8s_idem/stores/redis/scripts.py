"""The Lua scripts, one per operation, and the hashes by which servers identify them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

import hiredis

from integr8s_idem._util import speedups

LOADS: Final = 3
"""Attempts to load a script for one call before giving up on a server that does not keep it."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script; the comment at its top documents keys, arguments and answer."""

    text: str
    sha: str
    writes: bool = True


def _script(name: str, *, writes: bool = True) -> Script:
    text = files(__package__).joinpath(f"{name}.lua").read_text("utf-8")
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), writes)


RESERVE: Final = _script("reserve")
SETTLE: Final = _script("settle")
RENEW: Final = _script("renew")
RELEASE: Final = _script("release")
SCHEDULE: Final = _script("schedule")
READ: Final = _script("read", writes=False)
MARK: Final = _script("mark")
SEEN: Final = _script("seen")
SCRIPTS: Final = (RESERVE, SETTLE, RENEW, RELEASE, SCHEDULE, READ, MARK, SEEN)

Command = tuple[str | bytes | int, ...] | bytes
"""A command, in parts or packed."""


def pack(command: Command) -> bytes:
    """Return the bytes of a command."""
    return command if isinstance(command, bytes) else hiredis.pack_command(command)  # type: ignore[arg-type]  # of any length


def command_of(script: Script, keys: Sequence[str], args: Sequence[bytes | int]) -> bytes:
    """Return the call of a script, packed."""
    if speedups.native is not None:
        packed: bytes | None = speedups.native.pack_call(script.sha, keys, args)
        if packed is not None:
            return packed
    return pack(("EVALSHA", script.sha, len(keys), *keys, *args))
