"""What `integr8s-idem dlq` takes on a topic with many dead letters: seconds, and the most memory.

    python -m benchmarks.operating_letters [--dead-letters 10000] [--bytes 1000] [--json FILE]

Each command is a process of its own, on a real Kafka and a real Redis of this machine.
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
"""What is typed, by what it is called here; `nothing` is what Python and its imports take."""

_LAUNCHER: Final = """
import json, os, subprocess, sys, time
begin = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, used = os.wait4(process.pid, 0)
kilobytes = used.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
print(json.dumps([time.perf_counter() - begin, kilobytes, os.waitstatus_to_exitcode(status)]))
"""
"""A small process between: the kernel counts the memory of whoever starts a process as that process's own."""


@dataclass(frozen=True)
class Figure:
    """One command."""

    seconds: float
    megabytes: float
    """Most of its memory that was resident at once."""


def measured(dlq: Dlq, *arguments: str) -> Figure:
    """Run a command to its end; an error if it fails."""
    launcher = [sys.executable, "-S", "-c", _LAUNCHER]
    ran = subprocess.run(
        [*launcher, *dlq.command(*arguments)], env=dlq.environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    seconds, kilobytes, status = json.loads(ran.stdout)
    assert status == 0, f"{arguments} ended with {status}"
    return Figure(seconds, kilobytes / 1024)


async def figures(
    kafka: Kafka,
    prefix: str,
    redis_url: str,
    folder: Path,
    dead_letters: int,
    filling: int,
    commands: Collection[str] = COMMANDS.keys(),
) -> dict[str, Figure]:
    """What `commands` take on `dead_letters` dead letters whose payloads have about `filling` bytes each."""
    dlq, source = Dlq(folder / "settings.toml"), f"{prefix}order_placed"
    dlq.settings.write_text(
        f'[kafka]\nbootstrap_servers = "{kafka.bootstrap}"\ntopic_prefix = "{prefix}"\n[store]\nurl = "{redis_url}"\n'
    )
    await kafka.create_topics({source: PARTITIONS, f"{source}.dlq": PARTITIONS, f"{prefix}empty.dlq": 1})
    many = (dead_letter_of(number, topic=source, filling="x" * filling) for number in range(dead_letters))
    await post(load_settings(dlq.settings).kafka, many)
    return {
        name: await asyncio.to_thread(measured, dlq, *typed) for name, typed in COMMANDS.items() if name in commands
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure integr8s-idem dlq on many dead letters.")
    parser.add_argument("--dead-letters", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=1_000, help="of each payload, about")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, RedisServer(tcp=True) as redis:
        broker = KafkaBroker(Path(name))
        broker.start()
        try:
            found = asyncio.run(figures(broker, "", redis.url, Path(name), asked.dead_letters, asked.bytes))
        finally:
            broker.kill()
    print(f"{asked.dead_letters:,} dead letters of {asked.bytes:,} bytes, in {PARTITIONS} partitions")
    for command, figure in found.items():
        print(f"  {command:<10} {figure.seconds:6.1f} s  {figure.megabytes:6.0f} MB  dlq {' '.join(COMMANDS[command])}")
    if asked.json:
        told: dict[str, Any] = {command: asdict(figure) for command, figure in found.items()}
        asked.json.write_text(
            json.dumps({"dead_letters": asked.dead_letters, "bytes": asked.bytes, **told}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
