"""A SQLite file that is not there yet: whether a worker can make it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from integr8s_idem.config import Settings, SqliteStoreSettings
from integr8s_idem.diagnostics import Code, Finding, Severity

_WHERE: Final = "store.path"


async def is_to_be_made(settings: Settings) -> bool:
    """Whether the store is a SQLite file that is not there yet: to look into it would make it."""
    store = settings.store
    return isinstance(store, SqliteStoreSettings) and not await asyncio.to_thread(_is_there, store.path)


async def look_at_absent_file(store: SqliteStoreSettings) -> Finding:
    """What becomes of it at the first start of a worker."""
    try:
        await asyncio.to_thread(_write_beside, Path(store.path))
    except OSError as error:
        told = f"{store.path} is not there, and no file can be made in its folder ({error.strerror})"
        mend = "make that folder and let this user write into it, or change store.path"
        return Finding(Code.STORE_REFUSED, Severity.ERROR, _WHERE, told, "no worker starts", mend)
    told = f"{store.path} is not there yet"
    return Finding(Code.STORE_SEEN, Severity.INFO, "store", told, "", "it is made at the first start")


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except PermissionError:
        return False


def _write_beside(path: Path) -> None:
    # Rights alone do not tell: a file system may be read-only, or hold no files of ours.  This one has no name, or
    # loses it at once.
    with tempfile.TemporaryFile(dir=path.resolve().parent):
        pass
