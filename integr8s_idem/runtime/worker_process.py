"""A worker process, seen by its supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

ANSWER_SECONDS: Final = 3.0
"""Timeout for an answer of a worker process."""

LAST_LINE_SECONDS: Final = 1.0
"""How long to read what a process that has ended sent before, if a child of it keeps the socket open."""

MOST_BYTES: Final = 256 * 1024 * 1024
"""Longest answer: metrics of some thousand event types."""


@dataclass(frozen=True)
class Launch:
    """How to start a worker process.

    Args:
        command: Command line of a worker, to which the link is added: `--worker-process=NUMBER:FD`.
        folder: Working folder.
        env: Environment variables.
    """

    command: Sequence[str]
    folder: Path
    env: Mapping[str, str]

    def adding(self, *arguments: str) -> Launch:
        """Return a launch with more arguments."""
        return replace(self, command=[*self.command, *arguments])

    async def start(self, number: int) -> WorkerProcess:
        """Start the worker process `number`.

        Raises:
            OSError: The system cannot start another process.
        """
        own, inherited = socket.socketpair()
        with inherited:
            fd = inherited.fileno()
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    f"--worker-process={number}:{fd}",
                    pass_fds=[fd],
                    stdin=asyncio.subprocess.DEVNULL,
                    cwd=self.folder,
                    env=self.env,
                    # Ctrl-C on a terminal is for the supervisor, which drains the workers.
                    start_new_session=True,
                )
            except OSError:
                own.close()
                raise
        reader, writer = await asyncio.open_unix_connection(sock=own, limit=MOST_BYTES)
        return WorkerProcess(process, reader, writer)


class WorkerProcess:
    """A process that was started; it does not outlive this one, since its end of the socket pair would be closed."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._writer = writer
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._was_ready = False
        self._listening = asyncio.create_task(self._listen(reader), name="integr8s-idem worker process")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def was_ready(self) -> bool:
        """Whether one of its services has polled its topics; final when `wait` returns."""
        return self._was_ready

    async def wait(self) -> int:
        """Wait for its end, and return its exit status; -N if signal N killed it."""
        returncode = await self._process.wait()
        # The socket stays open if the process was forked by a handler.
        await asyncio.wait({self._listening}, timeout=LAST_LINE_SECONDS)
        self._listening.cancel()
        await asyncio.wait({self._listening})
        self._writer.close()
        return returncode

    def order(self, word: str) -> None:
        """Send `drain` or `stop`."""
        if not self._writer.is_closing():
            self._writer.write(f"{word}\n".encode())

    def kill(self) -> None:
        """Kill it and the processes in its group, if it has not ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def ask(self, question: str, seconds: float = ANSWER_SECONDS) -> Any:
        """Return the answer to `health` or `metrics`; `None` if there is none in time.

        A question that has not been answered yet is not repeated.
        """
        if self._listening.done():
            return None
        if question not in self._asked:
            self._asked[question] = asyncio.get_running_loop().create_future()
            self.order(question)
        # `wait_for` of Python 3.11 loses a cancellation that arrives together with the answer.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._asked[question])
        return None

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Read answers, and whether it is ready, until the process has ended."""
        try:
            with suppress(ConnectionError, ValueError):  # killed, perhaps in the middle of a line
                async for line in reader:
                    said = json.loads(line)
                    if "question" in said:
                        self._asked.pop(said["question"]).set_result(said["answer"])
                    self._was_ready |= "ready" in said
        finally:
            for future in self._asked.values():
                future.set_result(None)
            self._asked.clear()
