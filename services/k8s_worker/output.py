"""Read the output of a script in bounded memory."""

from __future__ import annotations

import asyncio
import os
from typing import Final

_CHUNK: Final = 65_536


def readable(kept: bytes, dropped: int | None) -> str:
    """Return output as text, with a note about missing bytes.  NUL is replaced, since some databases refuse it.

    Args:
        kept: The beginning of the output.
        dropped: Number of bytes missing at the end; `None` if some are missing but were not counted.
    """
    text = kept.decode("utf-8", "replace").replace("\x00", "\N{REPLACEMENT CHARACTER}")
    if dropped is None:
        return f"{text}\n[cut off here]"
    return f"{text}\n[cut off here: {dropped} more bytes]" if dropped else text


class Capture:
    """Keeps the first `keep` bytes of a stream, and counts and drops the rest."""

    def __init__(self, keep: int, flood: int, flooded: asyncio.Event) -> None:
        self._keep = keep
        self._flood = flood
        self._flooded = flooded
        self._kept = bytearray()
        self._received = 0
        self._transport: asyncio.ReadTransport | None = None
        self._reading: asyncio.Task[None] | None = None

    async def begin(self, readable: int) -> None:
        """Read the file descriptor `readable` to its end, and close it."""
        stream = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(readable, "rb", 0)
        )
        self._reading = asyncio.create_task(self._read(stream))

    async def finish(self, patience: float) -> None:
        """Return when the stream has ended, or after `patience` seconds."""
        if self._reading is None or self._transport is None:
            return
        try:
            await asyncio.wait([self._reading], timeout=patience)
        finally:
            self._reading.cancel()
            self._transport.close()

    def text(self) -> str:
        """Return the kept output, with a note about dropped bytes."""
        return readable(bytes(self._kept), self._received - len(self._kept))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while chunk := await stream.read(_CHUNK):
            self._received += len(chunk)
            room = self._keep - len(self._kept)
            if room > 0:
                self._kept += chunk[:room]
            if self._received > self._flood:
                self._flooded.set()
