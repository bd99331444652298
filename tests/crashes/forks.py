"""Worker processes, forked within milliseconds from a process that has already imported everything.

    async with ForkServer() as fork_server:
        worker = await fork_server.start(order)
        status = await worker.ended

The module given to `ForkServer` defines the work, by its `Order` and its `run_worker`.

The forking process has no event loop and no threads, so that children start in a clean state.  It kills its children
when the pipe from its parent is closed; the children exit when it is gone.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import selectors
import signal
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.crashes.orders import Order

FOLDER = Path(__file__).parents[2]


class ForkedWorker:
    """A worker process."""

    def __init__(self, fork_server: ForkServer, number: int, order: Order) -> None:
        loop = asyncio.get_running_loop()
        self.order = order
        self.pid: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        """The exit status; if a signal ended the process, its negated number."""
        self._fork_server = fork_server
        self._number = number

    @property
    def running(self) -> bool:
        return not self.ended.done()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal through the forking process, which knows whether the process ID is still valid."""
        self._fork_server.send({"number": self._number, "signal": int(number)})

    async def end(self, number: signal.Signals, seconds: float = 30.0) -> int:
        """Send a signal that ends the worker, and return its exit status.

        Raises:
            TimeoutError: The worker did not exit.
        """
        self.send_signal(number)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self.ended)


class ForkServer:
    """Starts workers by forking."""

    def __init__(self, module: str = "tests.crashes.worker") -> None:
        self._module = module
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._forked: dict[int, ForkedWorker] = {}
        self._count = 0

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.crashes.forks", self._module, stdin=PIPE, stdout=PIPE, cwd=FOLDER
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reading is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reading

    async def start(self, order: Order) -> ForkedWorker:
        """Start a worker with `order`."""
        self._count += 1
        forked = self._forked[self._count] = ForkedWorker(self, self._count, order)
        self.send({"number": self._count, "order": asdict(order)})
        await asyncio.shield(forked.pid)  # `_read` sets it even if this task is cancelled
        return forked

    def send(self, message: dict[str, Any]) -> None:
        """Send one line to the forking process."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            message = json.loads(line)
            forked = self._forked[message["number"]]
            if "pid" in message:
                forked.pid.set_result(message["pid"])
            else:
                del self._forked[message["number"]]
                forked.ended.set_result(message["status"])
        for forked in self._forked.values():
            for future in (forked.pid, forked.ended):
                if not future.done():
                    future.set_exception(RuntimeError("the process that forks workers is gone"))
                    future.exception()  # marks it as retrieved: asyncio logs no warning if nothing awaits it


class _Forker:
    """The forking process: one thread, no event loop."""

    def __init__(self, module: str) -> None:
        self._worker: Any = import_module(module)
        self._children: dict[int, int] = {}
        """Worker numbers by process ID."""
        self._woken, self._wake = os.pipe()

    def run(self) -> None:
        gc.freeze()  # children share these objects: a collection must not copy their pages
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            partial = b""
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if 0 in ready:
                    arrived = os.read(0, 65536)
                    if not arrived:
                        break
                    *lines, partial = (partial + arrived).split(b"\n")
                    for line in lines:
                        self._handle(json.loads(line))
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _handle(self, message: dict[str, Any]) -> None:
        if "order" in message:
            self._fork(message["number"], self._worker.Order(**message["order"]))
            return
        for pid, number in self._children.items():
            if number == message["number"]:
                os.kill(pid, message["signal"])

    def _fork(self, number: int, order: Order) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(order, parent)
        self._children[pid] = number
        _send({"number": number, "pid": pid})

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _send({"number": self._children.pop(pid), "status": os.waitstatus_to_exitcode(status)})

    def _run_child(self, order: Order, parent: int) -> None:
        """Run the worker in the child; never returns."""
        status = 2
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(Path(order.folder) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = self._worker.run_worker(order, parent)
        except BaseException:  # noqa: BLE001  # the parent's stack must not unwind in the child
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)


def _send(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    _Forker(sys.argv[1]).run()
