"""`integr8s-idem store`: migrations, their SQL, and purging of expired records."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sqlite3
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import integr8s_idem.stores.sql
from integr8s_idem.cli.app import app
from integr8s_idem.config import SqliteStoreSettings
from integr8s_idem.records import Completion, Reserved
from integr8s_idem.stores.factory import open_store
from integr8s_idem.stores.sql import SqlIdempotencyRepository, metadata
from integr8s_idem.testing.store_under_test import wish

SQLITE = '[store]\nkind = "sqlite"\npath = "idem.db"\n'


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("settings.toml").write_text(SQLITE)


def query(question: str) -> list[Any]:
    with closing(sqlite3.connect("idem.db")) as file:
        return file.execute(question).fetchall()


def run_script(script: str) -> None:
    with closing(sqlite3.connect("idem.db")) as file:
        file.executescript(script)


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["store", *arguments])


def tables() -> set[str]:
    found = query("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name for (name,) in found}


def test_tables_are_created_once() -> None:
    first, again = typed("migrate"), typed("migrate", "--json")

    assert (first.exit_code, first.stdout) == (
        0,
        "version 1: add records and the outbox\nversion 2: count lapsed attempts in records\n"
        "version 3: keep the trace of the previous attempt in records\n"
        "version 4: note when messages of the outbox were written\ndone\n",
    )
    assert tables() == {table.name for table in metadata.tables.values()}
    assert json.loads(again.stdout) == {"kind": "sqlite", "migrated": []}


def test_the_printed_sql_creates_the_tables_of_migrate() -> None:
    shown = typed("sql").stdout
    assert not Path("idem.db").exists()

    run_script(shown)

    assert typed("migrate").stdout == "the tables are up to date\n"


def test_the_sql_from_a_version_is_that_of_later_versions() -> None:
    everything, first, newer = (
        typed("sql").stdout,
        typed("sql", "--from", "0").stdout,
        typed("sql", "--from", "1").stdout,
    )

    assert first == everything
    assert newer.startswith("-- version 2: ")
    assert newer in everything
    assert "INSERT" not in newer


def test_sql_from_the_current_version_is_refused() -> None:
    refused = typed("sql", "--from", "4")

    assert refused.exit_code == 2
    assert "cannot migrate the schema from version 4 to 4" in message(refused)
    assert "use a version from 0 (no tables) to 3" in message(refused)


def test_only_expired_records_are_purged() -> None:
    asyncio.run(fill(expired=1_200, kept=3))

    answer = typed("purge", "--batch", "500", "--json")

    assert json.loads(answer.stdout) == {"kind": "sqlite", "purged": 1_200}
    assert query("SELECT count(*) FROM idempotency_records") == [(3,)]


def test_an_unknown_newer_schema_is_not_purged() -> None:
    asyncio.run(fill(expired=3, kept=0))
    run_script("UPDATE idempotency_store SET version = 9")

    purged, migrated = typed("purge"), typed("migrate")

    assert (purged.exit_code, migrated.exit_code) == (1, 1)
    assert "the store refuses purge: the schema has version 9, this code supports 4" in message(purged)
    assert "the store refuses migrate: the schema has version 9, this code supports 4" in message(migrated)
    assert query("SELECT count(*) FROM idempotency_records") == [(3,)]


@pytest.mark.parametrize("lost", ["DROP TABLE idempotency_store", "DELETE FROM idempotency_store"])
def test_tables_without_a_version_are_not_purged(lost: str) -> None:
    asyncio.run(fill(expired=3, kept=0))
    run_script(lost)

    answer = typed("purge")

    assert answer.exit_code == 1
    assert "run: integr8s-idem store migrate" in message(answer)
    assert query("SELECT count(*) FROM idempotency_records") == [(3,)]


def test_purge_does_not_create_a_missing_file() -> None:
    answer = typed("purge")

    assert answer.exit_code == 2
    assert "file idem.db of [store] path does not exist" in message(answer)
    assert not Path("idem.db").exists()


def message(answer: Result) -> str:
    return " ".join(answer.stderr.split())


async def fill(*, expired: int, kept: int) -> None:
    async with open_store(SqliteStoreSettings(kind="sqlite", path="idem.db"), key_prefix="idempotency") as store:
        assert isinstance(store, SqlIdempotencyRepository)
        verdicts = await store.reserve([wish(f"k{number}") for number in range(expired + kept)])
        taken = [verdict for verdict in verdicts if isinstance(verdict, Reserved)]
        await store.complete([Completion(reservation=one, ttl=timedelta(0)) for one in taken[:expired]])
        await store.complete([Completion(reservation=one, ttl=timedelta(days=8)) for one in taken[expired:]])


@pytest.mark.parametrize("command", ["migrate", "sql", "purge"])
def test_a_store_without_tables_is_refused_with_status_2(command: str) -> None:
    Path("settings.toml").write_text('[store]\nkind = "memory"\n')

    answer = typed(command)

    assert answer.exit_code == 2
    assert '[store] kind is "memory", which has no tables' in answer.stderr


def test_an_unavailable_database_is_reported_with_status_1() -> None:
    Path("settings.toml").write_text('[store]\nkind = "postgresql"\nurl = "postgresql://u:canary@127.0.0.1:1/x"\n')

    answer = typed("migrate")

    assert answer.exit_code == 1
    assert "no connection to postgresql" in answer.stderr
    assert "canary" not in answer.stderr


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_a_silent_database_is_reported_after_the_configured_timeout(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"{kind}://u@127.0.0.1:{silent.getsockname()[1]}/x"
        Path("settings.toml").write_text(f'[store]\nkind = "{kind}"\nurl = "{url}"\ntimeout_seconds = 0.3\n')

        answer = typed("purge")

    assert answer.exit_code == 1
    assert f"no answer from {kind} within 0.3 s" in message(answer)


@pytest.mark.parametrize("missing", ["sqlalchemy", "aiosqlite"])
def test_a_missing_extra_is_reported_with_its_installation(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integr8s_idem.stores, "sql", integr8s_idem.stores.sql)  # restored after the test
    for name in [name for name in sys.modules if name.startswith(("integr8s_idem.stores.sql", missing))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    answer = typed("migrate")

    assert answer.exit_code == 1
    assert 'pip install "integr8s-idem[sql]"' in answer.stderr
