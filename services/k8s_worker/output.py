"""Reading what a script writes, in bounded memory."""

from __future__ import annotations

import asyncio
import os
from typing import Final

_CHUNK: Final = 65_536


def readable(kept: bytes, dropped: int | None) -> str:
    """Output as text, with a line about what is missing.  No NUL: not every database keeps one.

    Args:
        dropped: How many bytes are missing at the end; `None` if some are and nobody has counted them.
    """
    text = kept.decode("utf-8", "replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")
    if dropped is None:
        return f"{text}\n[cut off here]"
    return f"{text}\n[cut off here: {dropped} more bytes]" if dropped else text


class Capture:
    """The beginning of a stream; what comes after `keep` bytes is counted and dropped."""

    def __init__(self, keep: int, flood: int, flooded: asyncio.Event) -> None:
        self._keep = keep
        self._flood = flood
        self._flooded = flooded
        self._kept = bytearray()
        self._received = 0
        self._transport: asyncio.ReadTransport | None = None
        self._reading: asyncio.Task[None] | None = None

    async def begin(self, readable: int) -> None:
        """Read from the file descriptor `readable`, to its end, and close it then."""
        stream = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(readable, "rb", 0)
        )
        self._reading = asyncio.create_task(self._read(stream))

    async def finish(self, patience: float) -> None:
        """Return when all is read, or `patience` seconds are over."""
        if self._reading is None or self._transport is None:
            return
        try:
            await asyncio.wait([self._reading], timeout=patience)
        finally:
            self._reading.cancel()
            self._transport.close()

    def text(self) -> str:
        """What was kept, with a line about what was not."""
        return readable(bytes(self._kept), self._received - len(self._kept))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_CHUNK):
            self._received += len(chunk)
            room = self._keep - len(self._kept)
            if room > 0:
                self._kept += chunk[:room]
            if self._received > self._flood:
                self._flooded.set()
