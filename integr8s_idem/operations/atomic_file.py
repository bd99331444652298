"""Write files atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TextIO

from integr8s_idem.errors import ApplicationError


@contextmanager
def open_atomically(path: Path, *, replace: bool = False) -> Iterator[TextIO]:
    """Write a temporary file next to the target of `path`, and rename it at the end of the block once it is on disk.

    Only its owner may read the file.  If the block fails, the file is removed.

    Args:
        path: The final path; if it is a symbolic link, its target is written.
        replace: Whether to replace an existing file.

    Raises:
        ApplicationError: The file exists, cannot be created or is not a regular file.
    """
    try:
        target = _target(path, replace=replace)
    except OSError as error:
        raise ApplicationError(f"cannot write {path}: {error.strerror}") from error
    # Named before it is created, unlike with `tempfile`: a signal may end the block between the two.
    part = target.with_name(f".{target.name}.{token_hex(4)}.part")
    try:
        with _created(part, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _created(part: Path, path: Path) -> TextIO:
    try:
        return open(  # `Path.open` has no opener
            part, "x", encoding="utf-8", newline="\n", opener=lambda name, flags: os.open(name, flags, 0o600)
        )
    except OSError as error:
        raise ApplicationError(f"cannot write {path}: {error.strerror}") from error


def _target(path: Path, *, replace: bool) -> Path:
    """Return the file to write, after all links.  The file of a rename must be on the same file system."""
    if path.is_dir():
        raise ApplicationError(f"{path} is a folder; name a file in it, such as {path / 'output'}")
    if path.exists():
        if not path.is_file():
            raise ApplicationError(
                f"{path} is not a regular file; to write to a pipe or a device, omit --output and redirect "
                "standard output"
            )
        if not replace:
            raise ApplicationError(f"{path} already exists; choose another file, or use --force to overwrite it")
    try:
        target = path.resolve()
    except RuntimeError as error:  # before Python 3.13
        raise _linked_in_a_loop(path) from error
    if target.is_symlink():  # from Python 3.13 on
        raise _linked_in_a_loop(path)
    return target


def _linked_in_a_loop(path: Path) -> ApplicationError:
    return ApplicationError(f"cannot write {path}: its symbolic links form a loop")
