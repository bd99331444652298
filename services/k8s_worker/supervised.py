"""The worker's end of a supervisor: its pipes, its report, its end.

The pipes are ours, not asyncio's: a process of asyncio counts as ended only once its pipes are, and what a
script has started may hold them open.
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
"""How long a supervisor may take to clean up before it is killed itself."""

_LAST_WORDS_SECONDS: Final = 2.0
"""How long output may still come once the supervisor is gone: only a process that got away holds the pipe then."""


class Supervised:
    """A script under its supervisor."""

    def __init__(self, keep: int, flood: int) -> None:
        self.flooded = asyncio.Event()
        self.stdout = Capture(keep, flood, self.flooded)
        self.stderr = Capture(keep, flood, self.flooded)
        self._ours = ExitStack()
        self._lifeline = ExitStack()
        self._report = -1
        self._told = b""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, spec: dict[str, Any]) -> None:
        """Start the supervisor.  It reads our pipes' other ends, which are closed here once it has them."""
        with ExitStack() as theirs:
            lifeline, _ = _pipe(theirs, self._lifeline)
            self._report, report = _pipe(self._ours, theirs)
            stdout = await _capture(self.stdout, theirs)
            stderr = await _capture(self.stderr, theirs)
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
        """Return when the script has ended and all that it has started is gone."""
        assert self._process is not None
        await self._process.wait()

    async def end(self) -> None:
        """End the script, if it still runs.  Returns once nothing is left of it and its output is read."""
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
            # It died without cleaning up.
            for line in self._lines()[:1]:
                with suppress(ProcessLookupError):
                    os.killpg(int(line), signal.SIGKILL)

    def report(self) -> dict[str, Any] | None:
        """How the script ended; `None` if the supervisor has not said so."""
        lines = self._lines()
        return json.loads(lines[1]) if len(lines) > 1 else None

    def _lines(self) -> list[bytes]:
        # Two short lines: they fit into the pipe, so the supervisor never waits for us to read them.
        with suppress(BlockingIOError):
            while told := os.read(self._report, 4096):
                self._told += told
        return self._told.splitlines()

    def close(self) -> None:
        """Give the pipes back."""
        self._lifeline.close()
        self._ours.close()


@asynccontextmanager
async def supervised(spec: dict[str, Any], *, keep: int, flood: int) -> AsyncIterator[Supervised]:
    """Start `spec` under a supervisor; at the end of the block nothing of it is left.

    Args:
        spec: As supervisor.py reads it, without `report`.
        keep: Bytes kept of each output stream.
        flood: Bytes of one stream after which `flooded` is set.

    Raises:
        OSError: It could not be started.
    """
    running = Supervised(keep, flood)
    # Tasks of their own: cancelled in the middle of starting, we would not know what was started.
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
    """A pipe whose ends are closed with the stacks of those who hold them."""
    readable, writable = os.pipe()
    reading.callback(os.close, readable)
    writing.callback(os.close, writable)
    return readable, writable


async def _capture(capture: Capture, theirs: ExitStack) -> int:
    """The end of a pipe that a script may write to."""
    readable, writable = os.pipe()
    theirs.callback(os.close, writable)
    await capture.begin(readable)
    return writable
