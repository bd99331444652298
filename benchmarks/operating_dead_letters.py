"""Measure the duration and peak memory of `integr8s-idem dlq` on a topic with many dead letters.

    python -m benchmarks.operating_dead_letters [--dead-letters 10000] [--bytes 1000] [--json FILE]

Each command runs in a separate process, with a real Kafka and a real Redis on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from integr8s_idem import load_settings
from tests.support.dead_letters import Dlq, dead_letter_of, post
from tests.support.kafka import Kafka, KafkaBroker
from tests.support.redis import RedisServer

PARTITIONS: Final = 3

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "nothing": ("replay", "--yes", "--topic", "empty"),
    "list": ("list", "--json"),
    "export": ("export",),
    "count": ("replay", "--dry-run"),
    "replay": ("replay", "--yes"),
    "once more": ("replay", "--yes"),
}
"""Arguments by name; `nothing` measures Python and its imports alone."""

_LAUNCHER: Final = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
kilobytes = used.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
print(json.dumps([time.perf_counter() - begin, kilobytes, os.waitstatus_to_exitcode(status)]))
"""
"""A small intermediate process, since the kernel counts the memory of the parent as that of the child."""


@dataclass(frozen=True)
class Figure:
    """Measurements of one command."""

    seconds: float
    megabytes: float
    """Peak resident memory."""


def measure(dlq: Dlq, *arguments: str) -> Figure:
    """Run a command, and raise AssertionError if it fails."""
    launcher = [sys.executable, "-S", "-c", _LAUNCHER]
    ran = subprocess.run(
        [*launcher, *dlq.command(*arguments)], env=dlq.environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    seconds, kilobytes, status = json.loads(ran.stdout)
    assert status == 0, f"{arguments} exited with status {status}"
    return Figure(seconds, kilobytes / 1024)


async def figures(
    kafka: Kafka,
    prefix: str,
    redis_url: str,
    folder: Path,
    dead_letters: int,
    payload_bytes: int,
    commands: Collection[str] = COMMANDS.keys(),
) -> dict[str, Figure]:
    """Measure `commands` on `dead_letters` dead letters with payloads of about `payload_bytes` each."""
    dlq, source = Dlq(folder / "settings.toml"), f"{prefix}order_placed"
    dlq.settings.write_text(
        f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\ntopic_prefix = "{prefix}"\n[store]\nurl = "{redis_url}"\n'
    )
    await kafka.create_topics({source: PARTITIONS, f"{source}.dlq": PARTITIONS, f"{prefix}empty.dlq": 1})
    many = (dead_letter_of(number, topic=source, filling="x" * payload_bytes) for number in range(dead_letters))
    await post(load_settings(dlq.settings).kafka, many)
    return {
        name: await asyncio.to_thread(measure, dlq, *command) for name, command in COMMANDS.items() if name in commands
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operating_dead_letters",
        description="Measure integr8s-idem dlq on many dead letters.",
    )
    parser.add_argument("--dead-letters", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=1_000, help="approximate size of each payload")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, RedisServer(tcp=True) as redis:
        broker = KafkaBroker(Path(name))
        broker.start()
        try:
            measurements = asyncio.run(
                figures(broker, "", redis.url, Path(name), arguments.dead_letters, arguments.bytes)
            )
        finally:
            broker.kill()
    print(f"{arguments.dead_letters:,} dead letters of {arguments.bytes:,} bytes, in {PARTITIONS} partitions")
    for command, figure in measurements.items():
        print(f"  {command:<10} {figure.seconds:6.1f} s  {figure.megabytes:6.0f} MB  dlq {' '.join(COMMANDS[command])}")
    if arguments.json:
        results: dict[str, Any] = {command: asdict(figure) for command, figure in measurements.items()}
        arguments.json.write_text(
            json.dumps({"dead_letters": arguments.dead_letters, "bytes": arguments.bytes, **results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
