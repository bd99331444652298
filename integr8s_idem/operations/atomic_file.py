"""Write files atomically."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from integr8s_idem.errors import ApplicationError


@contextmanager
def open_atomically(path: Path, *, replace: bool = False) -> Iterator[TextIO]:
    """Write a temporary file next to `path`, and rename it at the end of the block once it is synced to disk.

    Only its owner may read the file.  If the block fails, the file is removed.

    Args:
        path: The final path.
        replace: Whether to replace an existing file.

    Raises:
        ApplicationError: The file exists or cannot be created.
    """
    if path.exists() and not replace:
        raise ApplicationError(f"{path} already exists; choose another file, or use --force to overwrite it")
    try:
        handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise ApplicationError(f"cannot write {path}: {error.strerror}") from error
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:  # noqa: PTH123  # a descriptor, not a path
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
