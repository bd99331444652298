"""A worker process, seen by its supervisor."""

from __future__ import annotations

import asyncio
import socket

from integr8s_idem.runtime.worker_process import WorkerProcess


class Ended(asyncio.subprocess.Process):
    """A process that has ended."""

    def __init__(self) -> None:
        self.pid = 0


async def test_a_question_that_is_cancelled_when_its_process_ends_is_cancelled() -> None:
    """The supervisor cancels the task that asks whether a process is ready, and waits for the end of that task."""
    own, other = socket.socketpair()
    process = WorkerProcess(Ended(), *await asyncio.open_unix_connection(sock=own))
    [listening] = [task for task in asyncio.all_tasks() if task.get_name() == "integr8s-idem worker process"]
    asking = asyncio.create_task(process.ask("health"))
    listening.add_done_callback(lambda _: asking.cancel())
    await asyncio.sleep(0)
    other.close()

    await asyncio.wait({asking})

    assert asking.cancelled()
