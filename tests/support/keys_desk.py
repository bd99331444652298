"""A store with a record of each kind, and the `integr8s-idem keys` commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from typer.testing import CliRunner, Result

from integr8s_idem import IdempotencyManager
from integr8s_idem._util.tokens import new_token
from integr8s_idem.cli.app import app
from integr8s_idem.config import load_settings
from integr8s_idem.keys import Key
from integr8s_idem.records import (
    Completion,
    Failure,
    IdempotencyRecord,
    Reserved,
    ReserveRequest,
    StoredResult,
    TraceLink,
)
from integr8s_idem.stores import IdempotencyRepository
from integr8s_idem.stores.factory import open_store

T = TypeVar("T")

TRACE = TraceLink(bytes(range(16)), bytes(range(8)))
LONG = StoredResult(b'"' + b"r" * 998 + b'"')
TTL = timedelta(hours=1)


class Desk:
    """Runs `keys` commands on a store; `folder` has the settings, `audit` is the audit file."""

    def __init__(self, folder: Path, store: str, more: str = "") -> None:
        self.folder = folder
        self.audit = folder / "audit.jsonl"
        (folder / "settings.toml").write_text(f"[store]\n{store}\n[services.billing]\nmax_attempts = 3\n{more}")

    def typed(self, *arguments: str) -> Result:
        """Run `integr8s-idem keys` in this process."""
        return CliRunner().invoke(app, ["keys", *arguments, "--settings", str(self.folder / "settings.toml")])

    def changing(self, *arguments: str) -> Result:
        """Run a command that writes audit lines."""
        return self.typed(*arguments, "--audit-file", str(self.audit))

    def json_lines(self, *arguments: str) -> list[dict[str, Any]]:
        """Run a command with `--json` and return its lines."""
        answer = self.typed(*arguments, "--json")
        assert answer.exit_code == 0, answer.output
        return [json.loads(line) for line in answer.stdout.splitlines()]

    def explained(self, *arguments: str) -> dict[str, Any]:
        answer = self.typed("explain", *arguments, "--json")
        assert answer.exit_code == 0, answer.output
        explanation: dict[str, Any] = json.loads(answer.stdout)
        return explanation

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()] if self.audit.exists() else []

    def labels(self) -> list[str]:
        """Return the labels of all records."""
        return sorted(record["label"] for record in self.json_lines("list"))

    def do(self, work: Callable[[IdempotencyRepository], Awaitable[T]]) -> T:
        """Run `work` with the store, opened like a worker's."""

        async def done() -> T:
            settings = load_settings(self.folder / "settings.toml")
            async with open_store(settings.store, key_prefix=settings.idempotency.key_prefix) as store:
                return await work(store)

        return asyncio.run(done())

    def manage(self, work: Callable[[IdempotencyManager], Awaitable[T]]) -> T:
        """Run `work` with a manager of the service `billing`."""

        async def managed(store: IdempotencyRepository) -> T:
            settings = load_settings(self.folder / "settings.toml")
            manager = IdempotencyManager(settings.idempotency_for("billing"), store, scope="billing")
            try:
                return await work(manager)
            finally:
                await manager.close()

        return self.do(managed)

    def take(
        self, key: str | Key, *, lease: timedelta = timedelta(seconds=300), owner: str = "billing@host-7"
    ) -> Reserved:
        """Reserve a key for `billing`, without renewing the lease."""

        async def taken(manager: IdempotencyManager) -> Reserved:
            request = ReserveRequest(
                key=manager.space.full(manager.space.key(key)),
                token=new_token(),
                lease=lease,
                retention=timedelta(hours=1),
                fingerprint=b"f" * 16,
                owner=owner,
                trace=TRACE,
            )
            (verdict,) = await manager.repository.reserve([request])
            assert isinstance(verdict, Reserved)
            return verdict

        return self.manage(taken)

    def record(self, key: str) -> IdempotencyRecord | None:
        """Return the record of a key."""
        return self.manage(lambda manager: manager.get(key))

    def fill(self) -> None:
        """Create a completed, a failed, a held, a lapsed and a released record."""
        done, failed = self.take(event("1"), owner="gone"), self.take(event("2"), owner="gone")
        self.take("held")
        self.take("lapsed", lease=timedelta(milliseconds=1))
        released = self.take("released", owner="billing@host-8")

        async def settle(store: IdempotencyRepository) -> None:
            assert await store.complete([Completion(reservation=done, ttl=TTL, result=LONG)]) == [True]
            assert await store.fail([Failure(reservation=failed, ttl=TTL, error="no such account")]) == [True]
            assert await store.release([released]) == [True]

        self.do(settle)


def event(value: str) -> Key:
    """Return the key of an event of type `order_placed` for the handler `charge`."""
    return Key.of_event("charge", "order_placed", "id", value)
