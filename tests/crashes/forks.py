"""Workers by fork, from a process that has imported everything: one is there within some ten milliseconds.

    async with Nursery() as nursery:
        worker = await nursery.start(order)
        status = await worker.ended

What a worker does says the module that the nursery is given: by its `Order` and its `run_worker`.

The process that forks has no event loop and no threads, so that a child begins clean.  It ends its children
when its parent closes the pipe, for whatever reason; children end by themselves when it is gone.
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


class Forked:
    """A worker that was started."""

    def __init__(self, nursery: Nursery, number: int, order: Order) -> None:
        loop = asyncio.get_running_loop()
        self.order = order
        self.pid: asyncio.Future[int] = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()
        """Its exit status; minus the signal's number if one ended it."""
        self._nursery = nursery
        self._number = number

    @property
    def running(self) -> bool:
        return not self.ended.done()

    def send_signal(self, number: signal.Signals) -> None:
        """Through the process that forked it, which knows whether the process id is still its own."""
        self._nursery.tell({"number": self._number, "signal": int(number)})

    async def end(self, number: signal.Signals, seconds: float = 30.0) -> int:
        """Send a signal that ends it; its exit status.

        Raises:
            TimeoutError: It did not end.
        """
        self.send_signal(number)
        async with asyncio.timeout(seconds):
            return await asyncio.shield(self.ended)


class Nursery:
    """Starts workers."""

    def __init__(self, module: str = "tests.crashes.worker") -> None:
        self._module = module
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._forked: dict[int, Forked] = {}
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

    async def start(self, order: Order) -> Forked:
        """A worker that has begun to work on `order`."""
        self._count += 1
        forked = self._forked[self._count] = Forked(self, self._count, order)
        self.tell({"number": self._count, "order": asdict(order)})
        await asyncio.shield(forked.pid)  # told also if nobody waits any more
        return forked

    def tell(self, what: dict[str, Any]) -> None:
        """One line to the process that forks."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            told = json.loads(line)
            forked = self._forked[told["number"]]
            if "pid" in told:
                forked.pid.set_result(told["pid"])
            else:
                del self._forked[told["number"]]
                forked.ended.set_result(told["status"])
        for forked in self._forked.values():
            for waited in (forked.pid, forked.ended):
                if not waited.done():
                    waited.set_exception(RuntimeError("the process that forks workers is gone"))
                    waited.exception()  # told to whoever waits; nobody needs to


class _Forker:
    """The other side: one process, one thread, no event loop."""

    def __init__(self, module: str) -> None:
        self._worker: Any = import_module(module)
        self._children: dict[int, int] = {}
        """Numbers by process id."""
        self._woken, self._wake = os.pipe()

    def run(self) -> None:
        gc.freeze()  # children share what is there: a collection must not touch it
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            rest = b""
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if 0 in ready:
                    arrived = os.read(0, 65536)
                    if not arrived:
                        break
                    *lines, rest = (rest + arrived).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _obey(self, told: dict[str, Any]) -> None:
        if "order" in told:
            self._fork(told["number"], self._worker.Order(**told["order"]))
            return
        for pid, number in self._children.items():
            if number == told["number"]:
                os.kill(pid, told["signal"])

    def _fork(self, number: int, order: Order) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._live(order, parent)
        self._children[pid] = number
        _say({"number": number, "pid": pid})

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _say({"number": self._children.pop(pid), "status": os.waitstatus_to_exitcode(status)})

    def _live(self, order: Order, parent: int) -> None:
        """The child's life; never returns."""
        status = 2
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(Path(order.folder) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = self._worker.run_worker(order, parent)
        except BaseException:  # noqa: BLE001  # nothing of the parent's stack may run in the child
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(status)


def _say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    _Forker(sys.argv[1]).run()
