"""A worker process, seen by its supervisor."""

from __future__ import annotations

import asyncio
import socket

import pytest

from integr8s_idem.runtime import worker_process
from integr8s_idem.runtime.worker_process import WorkerProcess


class Ended(asyncio.subprocess.Process):
    """A process that has ended."""

    def __init__(self) -> None:
        self.pid = 0

    async def wait(self) -> int:
        return -9


async def test_a_question_that_is_cancelled_when_its_process_ends_is_cancelled() -> None:
    own, other = socket.socketpair()
    process = WorkerProcess(Ended(), *await asyncio.open_unix_connection(sock=own))
    [listening] = [task for task in asyncio.all_tasks() if task.get_name() == "integr8s-idem worker process"]
    asking = asyncio.create_task(process.ask("health"))
    listening.add_done_callback(lambda _: asking.cancel())
    await asyncio.sleep(0)
    other.close()

    await asyncio.wait({asking})

    assert asking.cancelled()


async def test_a_process_that_dies_as_soon_as_it_is_ready_was_ready() -> None:
    own, other = socket.socketpair()
    process = WorkerProcess(Ended(), *await asyncio.open_unix_connection(sock=own))
    other.sendall(b'{"ready": true}\n')
    other.close()

    assert await process.wait() == -9
    assert process.was_ready


async def test_children_that_keep_the_socket_of_a_dead_process_open_do_not_hide_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_process, "LAST_LINE_SECONDS", 0.01)
    own, other = socket.socketpair()
    process = WorkerProcess(Ended(), *await asyncio.open_unix_connection(sock=own))
    with other:
        assert await process.wait() == -9

    assert not process.was_ready
    assert await process.ask("health") is None
