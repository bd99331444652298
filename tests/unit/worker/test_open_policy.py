"""With `on_store_error = "open"`, a worker continues without the store."""

from __future__ import annotations

import asyncio

import pytest

from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.flaky_store import VERBS
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import Depot, all_committed, dispatcher_of, parcels, sent


@pytest.mark.parametrize("fails", [False, True])
@virtual_time
async def test_a_handler_that_ends_in_an_outage_does_not_stop_the_others(*, fails: bool) -> None:
    here, broker, depot = guarded(on_store_error="open"), sent(1), Depot(seconds=1)
    if fails:
        depot.errors[0] = [ValueError("the first run fails")]
    async with running(dispatcher_of(depot.handle, here), broker, ordering="none", concurrency=4) as worker:
        await worker.until(lambda: depot.started == [0])
        here.store.down.update(VERBS)
        await asyncio.sleep(2)
        broker.publish(*parcels(12)[1:])
        await worker.until(lambda: set(depot.done) >= set(range(1, 12)))
        here.store.down.clear()
        await worker.until(lambda: all_committed(worker))

    assert here.observer.counts[Signal.UNGUARDED] >= 11
