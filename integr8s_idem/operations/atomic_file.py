"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from integr8s_idem.errors import ApplicationError


@contextmanager
def whole_file(path: Path, *, replace: bool = False) -> Iterator[TextIO]:
    """Write a file beside `path`, and give it that name at the end of the block, once it is on the disk.

    Whoever it belongs to alone may read it.  Nothing is left of it if the block fails.

    Args:
        path: Its name in the end.
        replace: In place of a file that is there.

    Raises:
        ApplicationError: It is there, or cannot be made.
    """
    if path.exists() and not replace:
        raise ApplicationError(f"{path} is there already; write to another file, or say --force to replace it")
    try:
        handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise ApplicationError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with open(handle, "w", encoding="utf-8", newline="\n") as file:  # noqa: PTH123  # it is open already
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
