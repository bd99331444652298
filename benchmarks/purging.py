"""A worker's purge of many expired rows: how long it takes, and what it costs the work beside it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any, Final

from benchmarks.contestants import RESULT, Manager, must
from benchmarks.measuring import Flat, for_seconds, new_keys, rate, spread
from integr8s_idem.stores.sql import SqlIdempotencyRepository, writing
from integr8s_idem.stores.sql.schema import COMPLETED, records
from integr8s_idem.telemetry import SILENT
from integr8s_idem.worker.purger import Purger
from integr8s_idem.worker.store_circuit import StoreCircuit

ROUNDS: Final = 5
_ROWS_AT_ONCE: Final = 2_000
_DAY_US: Final = 86_400_000_000


class _Watched:
    """The store as a purger sees it: due soon, and it says when it begins and when there is nothing left."""

    purge_every = timedelta(seconds=1)

    def __init__(self, store: SqlIdempotencyRepository) -> None:
        self._store = store
        self.purged = 0
        self.begun = asyncio.Event()
        self.ended = False

    async def purge(self, most: int = 500) -> int:
        self.begun.set()
        went = await self._store.purge(most)
        self.purged += went
        self.ended = went < most
        return went


async def purged(store: SqlIdempotencyRepository, rows: int, seconds: float, tell: Callable[[str], None]) -> Flat:
    """Seconds of a purge of `rows`, and the rate of a busy manager beside it as a ratio to the rate without."""
    manager, keys, expired = Manager(store), new_keys("busy"), new_keys("expired")
    times, ratios = [], []
    for number in range(1, ROUNDS + 1):
        await _fill(store, list(islice(expired, rows)))
        gc.collect()
        alone = await rate(manager, "many", keys, for_seconds(seconds))
        watched = _Watched(store)
        purger = Purger("bench", watched, StoreCircuit(None, SILENT), SILENT)
        purger.begin()
        await watched.begun.wait()
        start = time.perf_counter()
        beside = await rate(manager, "many", keys, lambda: not watched.ended)  # noqa: B023  # used before it changes
        times.append(time.perf_counter() - start)
        await purger.stop()
        must(watched.purged == rows, f"{watched.purged} rows went, not {rows}")
        ratios.append(beside / alone)
        tell(f"round {number}: purge of {rows} rows {times[-1]:.1f} s, {alone:.0f}/s alone, {beside:.0f}/s beside it")
    return {"purge.rows": rows} | spread(times).flat("purge.seconds") | spread(ratios).flat("purge.ratio")


async def _fill(store: SqlIdempotencyRepository, keys: list[str]) -> None:
    """Records that were completed and have expired long ago."""
    then = time.time_ns() // 1_000 - _DAY_US
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        rows = [_row(key, then + number) for number, key in enumerate(keys[start : start + _ROWS_AT_ONCE])]
        async with writing(store.engine) as connection:
            await connection.execute(records.insert(), rows)
        await asyncio.sleep(0)


def _row(key: str, then: int) -> dict[str, Any]:
    times = {"fence": then, "expires_at": then, "settled_at": then}
    said = {"owner": "", "result": RESULT, "content_type": "application/json", "result_dropped": False, "error": ""}
    return {"key": key, "status": COMPLETED, "attempt": 1, "token": bytes(16), "previous": 0, **times, **said}
