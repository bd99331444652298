"""A worker reports whether it uses native code."""

from __future__ import annotations

from typing import Any

import pytest

from integr8s_idem._util import speedups
from integr8s_idem.telemetry import Gauge
from tests.support.fake_worker import running
from tests.support.guarded import guarded
from tests.support.pipelines import ParcelSent, all_committed, dispatcher_of, sent


@pytest.mark.parametrize("native", [speedups.LOADED.native, None], ids=["as installed", "python"])
async def test_a_worker_reports_whether_it_uses_native_code(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "native", native)
    manager = guarded()
    handled: list[ParcelSent] = []

    async def handle(event: ParcelSent) -> None:
        handled.append(event)

    async with running(dispatcher_of(handle, manager), sent(1)) as worker:
        await worker.until(lambda: all_committed(worker))

    assert len(handled) == 1
    assert manager.observer.gauges[Gauge.NATIVE_CODE] == (native is not None)
