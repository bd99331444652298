"""The worker's side of a supervisor: start it, read its pipes and its report, and end it.

The pipes are not asyncio's: asyncio considers a process ended only once its pipes are closed, and descendants of a
script may hold them open.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any, Final

from services.k8s_worker import supervisor
from services.k8s_worker.output import Capture

_ENDING_SECONDS: Final = supervisor.CLEANING_SECONDS + 5
"""How long a supervisor may take to clean up before it is killed."""

_LAST_WORDS_SECONDS: Final = 2.0
"""How long to read output after the supervisor has ended, when only an escaped process holds the pipe open."""


class Supervised:
    """A script under its supervisor."""

    def __init__(self, keep: int, flood: int) -> None:
        self.flooded = asyncio.Event()
        self.stdout = Capture(keep, flood, self.flooded)
        self.stderr = Capture(keep, flood, self.flooded)
        self._own = ExitStack()
        self._lifeline = ExitStack()
        self._report = -1
        self._received = b""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, spec: dict[str, Any]) -> None:
        """Start the supervisor, and close the pipe ends that it inherits."""
        with ExitStack() as inherited:
            lifeline, _ = _pipe(inherited, self._lifeline)
            self._report, report = _pipe(self._own, inherited)
            stdout = await _capture(self.stdout, inherited)
            stderr = await _capture(self.stderr, inherited)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", supervisor.__file__, json.dumps(spec | {"report": report})),
                stdin=lifeline,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(report,),
                start_new_session=True,
                env={},
            )

    async def wait(self) -> None:
        """Wait until the script and all its descendants have ended."""
        assert self._process is not None
        await self._process.wait()

    async def end(self) -> None:
        """End the script if it is running, and wait until it is gone and its output is read."""
        self._lifeline.close()
        if self._process is not None:
            await self._end_process(self._process)
        for capture in (self.stdout, self.stderr):
            await capture.finish(_LAST_WORDS_SECONDS)

    async def _end_process(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(_ENDING_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self.report() is None:
            # The supervisor died without cleaning up.
            for line in self._lines()[:1]:
                with suppress(ProcessLookupError):
                    os.killpg(int(line), signal.SIGKILL)

    def report(self) -> dict[str, Any] | None:
        """Return the supervisor's report of how the script ended, or `None`."""
        lines = self._lines()
        return json.loads(lines[1]) if len(lines) > 1 else None

    def _lines(self) -> list[bytes]:
        # Two short lines fit into the pipe, so the supervisor is never blocked.
        with suppress(BlockingIOError):
            while chunk := os.read(self._report, 4096):
                self._received += chunk
        return self._received.splitlines()

    def close(self) -> None:
        """Close the pipes."""
        self._lifeline.close()
        self._own.close()


@asynccontextmanager
async def supervised(spec: dict[str, Any], *, keep: int, flood: int) -> AsyncIterator[Supervised]:
    """Start `spec` under a supervisor; at the end of the block it is ended and cleaned up.

    Args:
        spec: The input of supervisor.py, without `report`.
        keep: Bytes kept of each output stream.
        flood: Bytes of one stream after which `flooded` is set.

    Raises:
        OSError: The supervisor could not be started.
    """
    running = Supervised(keep, flood)
    # In separate tasks, since a cancellation during the start would lose track of the process.
    starting = asyncio.ensure_future(running.start(spec))
    try:
        try:
            await asyncio.shield(starting)
            yield running
        finally:
            await asyncio.wait([starting])
            if not starting.exception():
                await running.end()
    finally:
        running.close()


def _pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    """Create a pipe whose ends are closed with the given stacks."""
    readable, writable = os.pipe()
    reading.callback(os.close, readable)
    writing.callback(os.close, writable)
    return readable, writable


async def _capture(capture: Capture, inherited: ExitStack) -> int:
    """Return the writable end of a pipe for a script's output."""
    readable, writable = os.pipe()
    inherited.callback(os.close, writable)
    await capture.begin(readable)
    return writable
