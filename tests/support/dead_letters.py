"""Create dead letters as a service writes them, and run `integr8s-idem dlq` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from integr8s_idem import EventPublisher
from integr8s_idem.cli.app import app
from integr8s_idem.config import KafkaSettings
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.worker.dead_letters import GENERATION, DeadLetter
from integr8s_idem.worker.publisher import Sendable
from tests.support.fake_consumer import FakeRecord
from tests.support.workers import OrderPlaced

ROOT = Path(__file__).parents[2]
SPACE = KeySpace("idempotency", "billing")


def dead_letter_of(
    number: int = 1,
    *,
    topic: str = "order_placed",
    reason: str = "handler_failed",
    error: BaseException | str = ValueError("no such card"),  # noqa: B008  # it is never modified
    service: str = "billing",
    generation: int = 0,
    guarded: bool = True,
    filling: str = "",
    more: Iterable[tuple[str, bytes]] = (),
    offset: int | None = None,
    timestamp: int = 1_893_456_000_000,
) -> FakeRecord:
    """Create the dead letter of order `number`, as it is stored in its topic."""
    event = OrderPlaced(
        order_id=f"{number}{filling}", event_id=f"event-{number}", aggregate_id=f"customer-{number % 7}"
    )
    headers = [*event_headers(event), *more]
    if generation:
        headers.append((GENERATION, str(generation).encode()))
    assert event.aggregate_id is not None
    record = FakeRecord(topic, 0, number, event.aggregate_id.encode(), encode_event(event), headers)
    key = Key.of_event("charge", "order_placed", "id", event.event_id)
    dead_letter = DeadLetter(
        reason, error, "charge", key.label, SPACE.full(key) if guarded else "", 2, generation, "order_placed"
    )
    at = number if offset is None else offset
    return FakeRecord(
        f"{topic}.dlq", 0, at, record.key, record.value, dead_letter.headers(record, service, service), timestamp
    )


def as_sent(record: FakeRecord) -> Sendable:
    """Convert a record for a publisher."""
    return record.topic, record.key, record.value, record.headers


async def post(kafka: KafkaSettings, records: Iterable[FakeRecord]) -> None:
    """Publish dead letters to their topics, in pages."""
    publisher, page = EventPublisher(kafka), list[Sendable]()
    try:
        for record in records:
            page.append(as_sent(record))
            if len(page) == 200:
                assert not any(await publisher.send_all(page))
                page = []
        assert not any(await publisher.send_all(page))
    finally:
        await publisher.close()


@dataclass(frozen=True)
class CommandResult:
    """The output and exit status of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Parse the whole output as one JSON value."""
        assert self.out, self.err
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Parse each line of the output as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True)
class Dlq:
    """Runs `integr8s-idem dlq`."""

    settings: Path
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        words = ["-m", "integr8s_idem", "dlq", *arguments]
        return [sys.executable, *words, "--settings", str(self.settings)]

    @property
    def audit(self) -> list[Any]:
        """Return the audit lines so far."""
        file = self.settings.parent / "state" / "integr8s-idem" / "audit.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.settings.parent / "state"), **self.env}

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            *self.command(*arguments),
            cwd=ROOT,
            env=self.environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        )

    async def typed(self, *arguments: str) -> CommandResult:
        """Run the command in a thread, since starting a process takes a second."""
        words = ["dlq", *arguments, "--settings", str(self.settings)]
        environment = {"XDG_STATE_HOME": str(self.settings.parent / "state"), **self.env}
        answer = await asyncio.to_thread(CliRunner().invoke, app, words, env=environment)
        return CommandResult(answer.exit_code, answer.stdout, answer.stderr)

    async def ran(self, *arguments: str) -> CommandResult:
        """Run the command in a process."""
        process = await self.start(*arguments)
        out, err = await process.communicate()
        assert process.returncode is not None
        return CommandResult(process.returncode, out.decode(), err.decode())
