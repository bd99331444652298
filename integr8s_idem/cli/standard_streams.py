"""Prepare the standard streams: open those that are closed, and escape characters that they cannot encode."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Final

_MODES: Final = {"stdin": "r", "stdout": "w", "stderr": "w"}
"""The streams in the order of their descriptors: 0, 1, 2."""


def open_missing_streams() -> None:
    """Open /dev/null on the standard descriptors that are closed, as after `<&-` or `2>&-` in a shell.

    Also gives Python the streams that it lacks.

    Call this before anything else opens a file or a socket.  The system reuses the lowest free descriptor, so that a
    socket could become descriptor 2: what other code prints would be written to it, and uvloop aborts the process when
    it closes one of these descriptors.
    """
    for descriptor in range(len(_MODES)):
        if not _is_open(descriptor):
            # All lower descriptors are open, so that this one is the lowest.  Child processes need it as well.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in _MODES.items():
        if getattr(sys, name) is None:
            # Not on the standard descriptor, which may belong to a file that Python has opened since.
            null = os.open(os.devnull, os.O_RDWR)
            stream = open(null, mode, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def escape_unencodable_text() -> None:
    """Write characters that are not in the encoding of standard output as escapes such as `\\u20ac`.

    Python raises an error for them by default, for example in a locale with ISO 8859-1.
    """
    stream = sys.stdout
    if isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        stream.reconfigure(errors="backslashreplace")


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
