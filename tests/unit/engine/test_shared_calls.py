"""In which context the store is called for several runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from integr8s_idem.records import ReserveRequest, Verdict
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry.log_fields import context_fields, logging_with
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import Guarded, Job, guarded


class ReservationsWithFields(MemoryIdempotencyRepository):
    """Notes the log fields of its reservations."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, object]] = []

    async def reserve(self, requests: Sequence[ReserveRequest]) -> list[Verdict]:
        self.fields.append(context_fields())
        return await super().reserve(requests)


async def run_for(event_id: str, here: Guarded) -> None:
    with logging_with(event_id=event_id):
        await here.manager.run(event_id, Job())


@virtual_time
async def test_what_is_logged_during_a_call_for_many_runs_names_the_service_and_no_event() -> None:
    store = ReservationsWithFields()
    here = guarded(FlakyStore(store))

    await asyncio.gather(*(run_for(str(number), here) for number in range(20)))

    assert store.fields
    assert all(fields == {"service": here.manager.scope} for fields in store.fields)


@virtual_time
async def test_what_is_logged_during_a_call_for_one_run_names_its_event() -> None:
    store = ReservationsWithFields()
    here = guarded(FlakyStore(store))
    await run_for("first", here)

    await run_for("second", here)

    assert store.fields[-1]["event_id"] == "second"
