"""The service of `processes.py`: `integr8s-idem run benchmarks.processes_app:platform`.

Each process counts its handled events in a file of its own, and fetches nothing before the file `go` exists.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from pathlib import Path
from typing import Any, Final

from aiokafka import AIOKafkaConsumer

from benchmarks.kafka import OrderPlaced
from benchmarks.processes import COUNT, FOLDER
from integr8s_idem import EventRouter, Platform, Service
from integr8s_idem.integrations.dishka import IdempotencyProvider, IdempotentDispatcherProvider, KafkaProvider


class Counter:
    """Counts in a file that another process reads, at the cost of a write to memory."""

    def __init__(self, folder: Path) -> None:
        file = folder / f"{os.getpid()}.count"
        file.write_bytes(COUNT.pack(0))
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), COUNT.size)
        self._count = 0

    def add(self) -> None:
        self._count += 1
        COUNT.pack_into(self._memory, 0, self._count)


folder: Final = Path(os.environ[FOLDER])
counter: Final = Counter(folder)
router = EventRouter()


@router.on(OrderPlaced)
async def ship(event: OrderPlaced) -> None:
    counter.add()


def _wait_for_go() -> None:
    fetch, is_open = AIOKafkaConsumer.getmany, False

    async def getmany(self: Any, *partitions: Any, **options: Any) -> Any:
        nonlocal is_open
        is_open = is_open or (folder / "go").exists()
        if not is_open:
            await asyncio.sleep(0.02)
            return {}
        return await fetch(self, *partitions, **options)

    AIOKafkaConsumer.getmany = getmany  # type: ignore[method-assign]


_wait_for_go()
platform = Platform(
    Service("bench", providers=[IdempotencyProvider(), KafkaProvider(), IdempotentDispatcherProvider(router)])
)
