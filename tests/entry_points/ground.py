"""Set up the processes of a case: real Redis, a proxy for each process, and real Kafka if needed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from subprocess import PIPE
from typing import Any, Self, TypeVar

from redis.asyncio import Redis

from integr8s_idem import IdempotencyConfig, IdempotencyManager
from integr8s_idem.functions.sync_bridge import own_loop
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.entry_points.callers import (
    BatchHandler,
    BatchVerbs,
    Decorated,
    DecoratedPlain,
    Dispatcher,
    ManagerRun,
    Step,
    StepAtMostOnce,
)
from tests.entry_points.entry import Entry, Process
from tests.entry_points.frameworks import FastStream, Http
from tests.entry_points.loops import Aiokafka, Confluent
from tests.support.counting import CountingObserver
from tests.support.fault_proxy import Address, FaultProxy
from tests.support.gated import GatedWork
from tests.support.kafka import Kafka
from tests.support.redis import url_of

ENTRIES: tuple[type[Entry], ...] = (
    ManagerRun,
    Decorated,
    DecoratedPlain,
    Http,
    Step,
    StepAtMostOnce,
    BatchVerbs,
    Dispatcher,
    BatchHandler,
    FastStream,
    Aiokafka,
    Confluent,
)

FOLDER = Path(__file__).parents[2]
LEASE = 60.0
"""In seconds; longer than any case lasts."""

EntryT = TypeVar("EntryT", bound=Entry)


@asynccontextmanager
async def opened(
    kind: type[EntryT], work: GatedWork, address: Address, place: str, kafka: Kafka | None, **config: Any
) -> AsyncIterator[tuple[EntryT, CountingObserver, FaultProxy]]:
    """Open one process with its own connection to the store."""
    settings = IdempotencyConfig(**{"processing_timeout_seconds": LEASE, "wait_timeout_seconds": LEASE, **config})
    observer = CountingObserver()
    async with FaultProxy(address) as proxy:
        client = Redis.from_url(url_of(proxy.address))
        store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=1))
        manager = IdempotencyManager(settings, store, observer, scope="billing")
        entry = kind(Process(manager, work, place, kafka, proxy))
        await entry.open()
        try:
            yield entry, observer, proxy
        finally:
            proxy.heal()
            work.may_end.set()
            await entry.close()
            await _on_its_loop(kind, _close(manager, client))


async def _close(manager: IdempotencyManager, client: Redis) -> None:
    await manager.close()
    await client.aclose()


async def _on_its_loop(kind: type[Entry], closing: Any) -> None:
    if kind.in_threads:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(closing, own_loop()))
    else:
        await closing


@dataclass(slots=True)
class Opened:
    """A process of a case, with its observer and the proxy to its store."""

    entry: Entry
    observer: CountingObserver
    store: FaultProxy


class Ground:
    """Opens the processes of one case and closes them all."""

    def __init__(self, address: Address, kafka: Kafka | None, crashes: Crashes, prefix: str) -> None:
        self._address = address
        self._kafka = kafka
        self._crashes = crashes
        self._prefix = prefix
        self._count = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def process(self, kind: type[Entry], work: GatedWork, *, place: str | None = None, **config: Any) -> Opened:
        """Open another process, by default in a new place."""
        where = place or self.new_place()
        opening = opened(kind, work, self._address, where, self._kafka, **config)
        return Opened(*await self._stack.enter_async_context(opening))

    def new_place(self) -> str:
        self._count += 1
        return f"{self._prefix}{self._count}"

    async def crash(self, kind: type[Entry], key: str, place: str, lease: float) -> dict[str, Any]:
        """Do the work of `key` in a separate process that dies after the effect, and return its run."""
        return await self._crashes.crash(kind, key, place, lease, self._address, self._kafka)


class Crashes:
    """A process with all imports done, which forks the processes that crash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parent: subprocess.Popen[str] | None = None

    def close(self) -> None:
        if self._parent is not None:
            self._parent.communicate(timeout=30)

    async def crash(
        self, kind: type[Entry], key: str, place: str, lease: float, address: Address, kafka: Kafka | None
    ) -> dict[str, Any]:
        effect = self._folder / f"effect-{place}"
        order = {
            "name": kind.name,
            "key": key,
            "place": place,
            "lease": lease,
            "redis": address if isinstance(address, int) else str(address),
            "kafka": kafka.bootstrap if kafka is not None else None,
            "effect": str(effect),
        }
        status = await asyncio.to_thread(self._send_order, json.dumps(order))
        assert status == STATUS, f"the crashing process exited with status {status}"
        run: dict[str, Any] = json.loads(effect.read_text())
        return run

    def _send_order(self, order: str) -> int:
        if self._parent is None:
            command = [sys.executable, "-m", "tests.entry_points.crashing"]
            self._parent = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, cwd=FOLDER, text=True)
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(order + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())


STATUS = 9
"""Exit status of a process that crashed as intended."""
