"""Check whether a worker can create a missing SQLite file."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Final

from integr8s_idem.config import Settings, SqliteStoreSettings
from integr8s_idem.diagnostics import Code, Finding, Severity

_WHERE: Final = "store.path"


async def is_missing(settings: Settings) -> bool:
    """Return whether the store is a SQLite file that does not exist; opening it would create it."""
    store = settings.store
    return isinstance(store, SqliteStoreSettings) and not await asyncio.to_thread(_exists, store.path)


async def check_missing_file(store: SqliteStoreSettings) -> Finding:
    """Check whether the first worker can create the file."""
    try:
        await asyncio.to_thread(_create_temporary_file, Path(store.path))
    except OSError as error:
        what = f"{store.path} does not exist, and no file can be created in its folder ({error.strerror})"
        remedy = "create the folder and make it writable for this user, or change store.path"
        return Finding(Code.STORE_REFUSED, Severity.ERROR, _WHERE, what, "workers cannot start", remedy)
    what = f"{store.path} does not exist yet"
    return Finding(Code.STORE_SEEN, Severity.INFO, "store", what, "", "the first worker creates it")


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except PermissionError:
        return False


def _create_temporary_file(path: Path) -> None:
    # Permissions are not sufficient: the file system may be read-only.  The temporary file has no name, or loses it
    # at once.
    with tempfile.TemporaryFile(dir=path.resolve().parent):
        pass
