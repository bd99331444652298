"""Fork processes that crash in the middle of their work: `python -m tests.entry_points.crashing`.

Standard input has one order per line, in JSON.  The parent has no event loop and no threads, so that its children
start clean.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.entry_points.ground import ENTRIES, STATUS, opened
from tests.support.gated import GatedWork, Run
from tests.support.kafka import Kafka


async def crash(order: dict[str, Any]) -> None:
    [kind] = [each for each in ENTRIES if each.name == order["name"]]
    address = order["redis"] if isinstance(order["redis"], int) else Path(order["redis"])
    kafka = Kafka(order["kafka"]) if order["kafka"] else None

    def die(run: Run) -> None:
        Path(order["effect"]).write_text(json.dumps(asdict(run)))
        os._exit(STATUS)

    config = {"processing_timeout_seconds": order["lease"]}
    async with opened(kind, GatedWork(die), address, order["place"], kafka, **config) as (entry, _, _):
        await entry.send(order["key"])


def _child(line: str) -> None:
    try:
        asyncio.run(crash(json.loads(line)))
    except BaseException:  # noqa: BLE001  # the exit status reports it
        traceback.print_exc()
    os._exit(1)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _child(line)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
