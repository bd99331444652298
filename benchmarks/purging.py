"""A worker's purge of many expired rows: its duration, and its effect on concurrent work."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import islice
from typing import Any, Final

from benchmarks.contestants import RESULT, Manager, ensure
from benchmarks.measuring import Flat, new_keys, rate, running_for, spread
from integr8s_idem.stores.sql import SqlIdempotencyRepository, writing
from integr8s_idem.stores.sql.schema import COMPLETED, records
from integr8s_idem.telemetry import SILENT
from integr8s_idem.worker.purger import Purger
from integr8s_idem.worker.store_circuit import StoreCircuit

ROUNDS: Final = 5
_ROWS_AT_ONCE: Final = 2_000
_DAY_US: Final = 86_400_000_000


class _ObservedStore:
    """A store that is due for a purge soon, and reports when the purge starts and ends."""

    purge_every = timedelta(seconds=1)

    def __init__(self, store: SqlIdempotencyRepository) -> None:
        self._store = store
        self.purged = 0
        self.started = asyncio.Event()
        self.ended = False

    async def purge(self, most: int = 500) -> int:
        self.started.set()
        deleted = await self._store.purge(most)
        self.purged += deleted
        self.ended = deleted < most
        return deleted


async def measure_purge(
    store: SqlIdempotencyRepository, rows: int, seconds: float, progress: Callable[[str], None]
) -> Flat:
    """Measure a purge of `rows`, and the rate of a busy manager during it, as a ratio to the rate before."""
    manager, keys, expired = Manager(store), new_keys("busy"), new_keys("expired")
    times, ratios = [], []
    for number in range(1, ROUNDS + 1):
        await _fill(store, list(islice(expired, rows)))
        gc.collect()
        before = await rate(manager, "many", keys, running_for(seconds))
        observed = _ObservedStore(store)
        purger = Purger("bench", observed, StoreCircuit(None, SILENT), SILENT)
        purger.begin()
        await observed.started.wait()
        start = time.perf_counter()
        during = await rate(manager, "many", keys, lambda: not observed.ended)  # noqa: B023  # used before it changes
        times.append(time.perf_counter() - start)
        await purger.stop()
        ensure(observed.purged == rows, f"{observed.purged} rows were deleted, not {rows}")
        ratios.append(during / before)
        progress(
            f"round {number}: purge of {rows} rows {times[-1]:.1f} s, {before:.0f}/s before, {during:.0f}/s during it"
        )
    return {"purge.rows": rows} | spread(times).flat("purge.seconds") | spread(ratios).flat("purge.ratio")


async def _fill(store: SqlIdempotencyRepository, keys: list[str]) -> None:
    """Insert completed records that expired a day ago."""
    then = time.time_ns() // 1_000 - _DAY_US
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        rows = [_row(key, then + number) for number, key in enumerate(keys[start : start + _ROWS_AT_ONCE])]
        async with writing(store.engine) as connection:
            await connection.execute(records.insert(), rows)
        await asyncio.sleep(0)


def _row(key: str, then: int) -> dict[str, Any]:
    times = {"fence": then, "expires_at": then, "settled_at": then}
    rest = {"owner": "", "result": RESULT, "content_type": "application/json", "result_dropped": False, "error": ""}
    return {"key": key, "status": COMPLETED, "attempt": 1, "token": bytes(16), "previous": 0, **times, **rest}
