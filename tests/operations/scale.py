"""Measure the time and memory of `integr8s-idem keys` on a store with many records.

    python -m tests.operations.scale --keys 1000000

The records are written to real Redis by the store itself.  Each command runs in a separate process, whose memory is
sampled from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import psutil

from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.records import Completion, Failure, Reserved, ReserveRequest, StoredResult
from integr8s_idem.stores.redis import RedisIdempotencyRepository
from tests.support.redis import RedisServer

BATCH: Final = 1_000
SPACE: Final = KeySpace("idempotency", "billing")
TTL: Final = timedelta(hours=6)
RESULT: Final = StoredResult(b'{"receipt": "r-0192", "amount": "30.00"}')
_MEGABYTE: Final = 2**20
_LOOK_SECONDS: Final = 0.01


@dataclass(frozen=True)
class Run:
    """Time, memory and output of one command."""

    command: str
    seconds: float
    peak_mb: float
    """Peak resident memory."""
    lines: int
    """Lines of standard output."""
    output: bytes
    """The beginning of standard output."""
    status: int


def event_id(number: int) -> str:
    """Return the same event ID for the same number."""
    return str(uuid.UUID(int=(0x0192 << 112) + number))


def key_of(number: int) -> str:
    """Return the full key of a record."""
    return SPACE.full(Key.of_event("charge", "order_placed", "id", event_id(number)))


async def fill(server: RedisServer, records: int) -> None:
    """Write records: of every ten, one failed, one in progress, eight completed."""
    client = server.client()
    store = RedisIdempotencyRepository(client, timeout=timedelta(seconds=30))
    for start in range(0, records, BATCH):
        requests = [
            ReserveRequest(
                key=key_of(number), token=os.urandom(16), lease=TTL, retention=TTL, fingerprint=os.urandom(16)
            )
            for number in range(start, min(start + BATCH, records))
        ]
        reserved = [verdict for verdict in await store.reserve(requests) if isinstance(verdict, Reserved)]
        assert len(reserved) == len(requests)
        await store.fail([Failure(reservation=one, ttl=TTL, error="no such account") for one in reserved[::10]])
        done = [one for number, one in enumerate(reserved) if number % 10 > 1]
        await store.complete([Completion(reservation=one, ttl=TTL, result=RESULT) for one in done])
    await client.aclose()


def run(folder: Path, *arguments: str) -> Run:
    """Run `integr8s-idem keys …` in `folder`."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "integr8s_idem", "keys", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_STATE_HOME": str(folder)},
    )
    peak = _Peak(process.pid)
    peak.start()
    lines, beginning = 0, b""
    assert process.stdout is not None
    with process.stdout as output:
        while chunk := output.read(_MEGABYTE):
            lines += chunk.count(b"\n")
            beginning = beginning or chunk
    status = process.wait()
    seconds = time.perf_counter() - began
    peak.join()
    return Run(" ".join(arguments), seconds, peak.bytes / _MEGABYTE, lines, beginning, status)


class _Peak(threading.Thread):
    """Samples the memory of a process until it exits."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self.bytes = 0

    def run(self) -> None:
        try:
            while self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE:
                self.bytes = max(self.bytes, self._process.memory_info().rss)
                time.sleep(_LOOK_SECONDS)
        except psutil.NoSuchProcess:
            return


def measured(server: RedisServer, records: int, folder: Path, only: Sequence[str] = ()) -> dict[str, Run]:
    """Run the commands, or those named in `only`, and return their measurements by name."""
    (folder / "settings.toml").write_text(f'[store]\nkind = "redis"\nurl = "{server.url}"\n')
    number = records // 2 + 2
    commands = {
        "explain by key": ("explain", key_of(number)),
        "explain by event id": ("explain", event_id(number)),
        "list": ("list", "--json"),
        "purge failed": ("purge", "--status", "failed", "--yes", "--json"),
    }
    return {name: run(folder, *command) for name, command in commands.items() if not only or name in only}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=20_000)
    records = parser.parse_args(arguments).keys
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        asyncio.run(fill(server, records))
        print(f"{records:,} records written in {time.perf_counter() - began:.0f} s")
        for name, took in measured(server, records, Path(folder)).items():
            figures = f"{took.seconds:7.1f} s  {took.peak_mb:6.0f} MB  {took.lines:>9,} lines"
            print(f"{name:<26} {figures}  status {took.status}")


if __name__ == "__main__":
    main()
