"""Kafka over a network that resets connections, goes silent, drops responses and flips bits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cache

import pytest

from integr8s_idem.telemetry import Signal
from tests.kafka_faults import servers
from tests.kafka_faults.tools import need_kafka
from tests.kafka_faults.workload import Workload, open_workload
from tests.support.conditions import eventually
from tests.support.counting import CountingObserver
from tests.support.fault_proxy import Corrupt, Cut, Delay, FaultProxy, HalfOpen
from tests.support.kafka.broker import Kafka, KafkaBroker
from tests.support.ports import reserve_port
from tests.support.workers import OrderPlaced

pytestmark = pytest.mark.kafka

BATCH_SIZE_FROM_KEY = -(61 + 6) + 8
"""Distance from the key of a batch's first record to the batch length: back over the record's first fields and the
header, then forward over the base offset."""


@cache
def _broker() -> tuple[KafkaBroker, int]:
    """Start a broker that advertises the port of the proxy, and return it with that port."""
    port = reserve_port()
    return servers.own_broker({"advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}"}), port


@dataclass
class Network:
    """A workload, and the proxy between it and the broker."""

    proxy: FaultProxy
    workload: Workload


@pytest.fixture
async def network() -> AsyncIterator[Network]:
    need_kafka(own=True)
    broker, port = await asyncio.to_thread(_broker)
    async with (
        FaultProxy(int(broker.bootstrap.split(":")[1]), listen=port) as proxy,
        open_workload(Kafka(f"127.0.0.1:{port}"), request_timeout_seconds=3) as workload,
    ):
        member = await workload.join()
        await eventually(lambda: member.worker.health().ready)
        try:
            yield Network(proxy, workload)
        finally:
            proxy.heal()


async def resets(network: Network) -> None:
    for _ in range(5):
        network.proxy.reset()
        await asyncio.sleep(0.3)


async def half_open(network: Network) -> None:
    with network.proxy.fault(HalfOpen()) as placed:
        await eventually(lambda: placed.struck >= 2)


async def delays(network: Network) -> None:
    with network.proxy.fault(Delay(0.3)):
        await asyncio.sleep(2)


async def stall(network: Network) -> None:
    await network.proxy.hold(2)


async def lost_commit_responses(network: Network) -> None:
    """Every second OffsetCommit is executed, but its response is lost."""
    commits = Cut(matching=b"\x00\x08\x00", also=network.workload.group.encode(), times=3, every=2)
    placed = network.proxy.put(commits)
    await eventually(lambda: placed.struck == 3)


async def lost_produce_responses(network: Network) -> None:
    """Every second batch of events is written, but its response is lost."""
    placed = network.proxy.put(Cut(matching=b'"order_id"', times=3, every=2))
    await eventually(lambda: placed.struck == 3)


@pytest.mark.scenario(60, 68)
@pytest.mark.parametrize(
    "fault", [resets, half_open, delays, stall, lost_commit_responses, lost_produce_responses], ids=lambda f: f.__name__
)
async def test_network_faults_to_kafka_lose_and_repeat_nothing(
    network: Network, fault: Callable[[Network], Awaitable[None]]
) -> None:
    feeding = asyncio.create_task(network.workload.feed(every=0.1))
    await eventually(lambda: network.workload.effects.ended())

    await fault(network)
    network.proxy.heal()
    feeding.cancel()
    await asyncio.wait({feeding})
    await network.workload.publish_round()
    await network.workload.all_settled()

    assert (await network.workload.judge())["repeats"] == 0


@pytest.mark.scenario(66, 67)
async def test_a_damaged_batch_stops_only_its_partition_with_an_alarm(network: Network) -> None:
    workload, observer = network.workload, CountingObserver()
    [member] = workload.members
    assert member.worker._poller is not None
    # That of the worker too: if its client is replaced, the next poller gets it.
    member.worker.observer = member.worker._poller._observer = observer
    network.proxy.put(Corrupt(b"poisoned", times=None))
    await workload.publisher.publish(OrderPlaced(order_id="poisoned", aggregate_id=f"{workload.group}-0"))
    for _ in range(3):
        await workload.publish_round()
    await eventually(lambda: observer.counts[Signal.PARTITION_DAMAGED] == 1)
    await workload.publish_round()
    [damaged] = [partition for partition in member.worker._partitions.assignments.values() if partition.damaged]

    others = {work for work in workload.published if workload.partition_of(work) != damaged.partition.partition}
    await eventually(lambda: workload.effects.done() >= others, state=workload.snapshot)

    assert observer.counts[Signal.PARTITION_DAMAGED] == 1
    assert "poisoned" not in workload.effects.done()


async def test_a_batch_whose_length_is_damaged_in_transit_is_fetched_again(network: Network) -> None:
    """The client treats it as a message beyond its limits and skips one offset, which must not persist."""
    workload = network.workload
    placed = network.proxy.put(Corrupt(b"poisoned", BATCH_SIZE_FROM_KEY, mask=0x7F))

    await workload.publisher.publish(OrderPlaced(order_id="1-0", aggregate_id="poisoned"))
    workload.published.append("1-0")
    await workload.all_settled()

    assert placed.struck == 1
    assert (await workload.judge())["repeats"] == 0
