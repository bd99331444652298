"""The store circuit."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from integr8s_idem.errors import StoreConfigurationError, StoreUnavailableError
from integr8s_idem.records import StoreHealth
from integr8s_idem.telemetry import Gauge, Signal
from integr8s_idem.testing.virtual_time import virtual_time
from integr8s_idem.worker.store_circuit import StoreCircuit
from tests.support.counting import CountingObserver

DOWN = StoreUnavailableError("reserve", "connection refused")


class Store:
    """A store whose `ping` can fail."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.pings = 0
        self.identity = ""
        self.lineage = ("", "")
        self.start = ""
        self.keeps_all = False

    async def ping(self) -> StoreHealth:
        self.pings += 1
        if self.error is not None:
            raise self.error
        return StoreHealth(
            kind="fake",
            version="1",
            latency=timedelta(0),
            identity=self.identity,
            lineage=self.lineage,
            start=self.start,
            keeps_all=self.keeps_all,
        )


def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@virtual_time
async def test_waiting_returns_immediately_while_the_store_is_available() -> None:
    circuit = StoreCircuit(Store().ping, CountingObserver())

    await circuit.wait(unless=never())

    assert circuit.is_available
    assert asyncio.get_running_loop().time() == 0


@virtual_time
async def test_all_waiters_continue_within_two_seconds_after_the_store_is_available_again() -> None:
    store, observer = Store(), CountingObserver()
    circuit, store.error = StoreCircuit(store.ping, observer), DOWN
    circuit.mark_unavailable(DOWN)
    assert (circuit.is_available, observer.gauges[Gauge.STORE_UP]) == (False, 0)
    assert "connection refused" in circuit.reason
    waiting = [asyncio.create_task(circuit.wait(unless=never())) for _ in range(5)]

    await asyncio.sleep(600)
    assert not any(task.done() for task in waiting)
    store.error = None
    await asyncio.gather(*waiting)

    assert asyncio.get_running_loop().time() <= 602
    assert (circuit.is_available, circuit.reason, observer.gauges[Gauge.STORE_UP]) == (True, "", 1)
    assert 300 <= store.pings <= 6_000


@virtual_time
async def test_waiting_ends_when_the_assignment_closes() -> None:
    store, closing = Store(), never()
    circuit, store.error = StoreCircuit(store.ping, CountingObserver()), DOWN
    circuit.mark_unavailable(DOWN)
    waiting = asyncio.create_task(circuit.wait(unless=closing))
    await asyncio.sleep(1)

    closing.set_result(None)
    await waiting

    assert not circuit.is_available
    await circuit.stop()


@virtual_time
async def test_a_bug_in_ping_does_not_keep_the_store_unavailable_forever() -> None:
    store = Store()
    circuit, store.error = StoreCircuit(store.ping, CountingObserver()), ZeroDivisionError()
    circuit.mark_unavailable(DOWN)
    await asyncio.sleep(10)
    assert circuit.reason == "ZeroDivisionError"

    store.error = None
    await circuit.wait(unless=never())

    assert circuit.is_available


@virtual_time
async def test_many_errors_start_one_probe() -> None:
    store = Store()
    circuit, store.error = StoreCircuit(store.ping, CountingObserver()), DOWN

    for _ in range(50):
        circuit.mark_unavailable(DOWN)
    await asyncio.sleep(0.2)

    assert store.pings <= 3
    await circuit.stop()


@virtual_time
async def test_wait_out_returns_when_the_store_is_available_again() -> None:
    store = Store()
    circuit, store.error = StoreCircuit(store.ping, CountingObserver()), DOWN
    asyncio.get_running_loop().call_later(60, setattr, store, "error", None)

    await circuit.wait_out(DOWN)

    assert 60 <= asyncio.get_running_loop().time() <= 62


@virtual_time
async def test_a_circuit_without_a_store_is_always_available() -> None:
    circuit = StoreCircuit(None, CountingObserver())

    circuit.mark_unavailable(DOWN)
    await circuit.check()

    assert circuit.is_available


@virtual_time
async def test_a_check_raises_errors_of_the_store() -> None:
    store = Store()
    circuit, store.error = StoreCircuit(store.ping, CountingObserver()), StoreConfigurationError("ping", "NOAUTH")

    with pytest.raises(StoreConfigurationError):
        await circuit.check()


@virtual_time
async def test_a_stopped_circuit_does_not_probe() -> None:
    store = Store()
    circuit, store.error = StoreCircuit(store.ping, CountingObserver()), DOWN
    circuit.mark_unavailable(DOWN)

    await circuit.stop()
    pings = store.pings
    await asyncio.sleep(60)

    assert store.pings == pings


@pytest.mark.scenario(46)
@virtual_time
async def test_a_store_that_lost_its_data_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    store, observer = Store(), CountingObserver()
    circuit, store.identity = StoreCircuit(store.ping, observer), "first"
    await circuit.check()
    await asyncio.sleep(60)
    assert observer.counts[Signal.STORE_DATA_LOST] == 0

    store.identity = "second"
    await asyncio.sleep(60)
    await circuit.stop()

    assert observer.counts[Signal.STORE_DATA_LOST] == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "lost its records" in caplog.text
    assert circuit.is_available


@pytest.mark.parametrize(
    ("identity", "lineage", "start", "keeps_all", "counted"),
    [
        ("data", ("a", ""), "second", False, Signal.STORE_RESTART),
        ("data", ("a", ""), "second", True, None),
        ("data", ("a", ""), "", False, None),
        ("data", ("b", "a"), "second", False, Signal.STORE_FAILOVER),
        ("others", ("b", "a"), "second", False, Signal.STORE_DATA_LOST),
    ],
    ids=["restarted", "restarted without loss", "start unknown", "failed over", "replaced"],
)
@virtual_time
async def test_a_restart_is_counted_once_as_the_worst_case(
    identity: str, lineage: tuple[str, str], start: str, keeps_all: bool, counted: Signal | None
) -> None:
    store, observer = Store(), CountingObserver()
    circuit, store.keeps_all = StoreCircuit(store.ping, observer), keeps_all
    store.identity, store.lineage, store.start = "data", ("a", ""), "first"
    await circuit.check()

    store.identity, store.lineage, store.start = identity, lineage, start
    await asyncio.sleep(60)
    await circuit.stop()

    losses = (Signal.STORE_DATA_LOST, Signal.STORE_FAILOVER, Signal.STORE_RESTART)
    assert [observer.counts[signal] for signal in losses] == [int(signal is counted) for signal in losses]


@virtual_time
async def test_data_loss_during_an_outage_is_detected_at_its_end() -> None:
    store, observer = Store(), CountingObserver()
    circuit, store.identity = StoreCircuit(store.ping, observer), "first"
    await circuit.check()
    store.error = DOWN
    circuit.mark_unavailable(DOWN)
    await asyncio.sleep(60)

    store.error, store.identity = None, "second"
    await circuit.wait(unless=never())
    await circuit.stop()

    assert observer.counts[Signal.STORE_DATA_LOST] == 1


@virtual_time
async def test_a_failed_periodic_check_is_reported_but_does_not_pause_the_service() -> None:
    store, observer = Store(), CountingObserver()
    circuit, store.identity = StoreCircuit(store.ping, observer), "first"
    await circuit.check()

    store.error = DOWN
    await asyncio.sleep(60)
    assert (circuit.is_available, observer.gauges[Gauge.STORE_UP]) == (True, 0)
    store.error = None
    await asyncio.sleep(60)
    await circuit.stop()

    assert observer.gauges[Gauge.STORE_UP] == 1


@virtual_time
async def test_a_store_without_an_identity_is_not_checked_periodically() -> None:
    store = Store()
    circuit = StoreCircuit(store.ping, CountingObserver())

    await circuit.check()
    await asyncio.sleep(60)

    assert store.pings == 1


@virtual_time
async def test_a_bug_in_ping_does_not_end_the_periodic_checks() -> None:
    store, observer = Store(), CountingObserver()
    store.identity = "before"
    circuit = StoreCircuit(store.ping, observer)
    await circuit.check()
    store.error = ZeroDivisionError()
    await asyncio.sleep(60)

    store.error, store.identity = None, "after"
    await asyncio.sleep(10)

    assert observer.counts[Signal.STORE_DATA_LOST] == 1
    await circuit.stop()
