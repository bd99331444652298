"""`integr8s-idem store` with a DynamoDB store, on DynamoDB Local."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from uuid import uuid4

import pytest
from typer.testing import CliRunner, Result

from integr8s_idem.cli.app import app
from integr8s_idem.config import load_settings
from integr8s_idem.records import Reserved
from integr8s_idem.stores.factory import open_store
from integr8s_idem.testing.store_under_test import wish
from tests.support.dynamodb.server import DynamoServer


@pytest.fixture(autouse=True)
def name(dynamodb: DynamoServer, aws: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Write settings.toml, and return the name of its table, which does not exist yet."""
    for variable in [variable for variable in os.environ if variable.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(tmp_path)
    name = f"idem-{uuid4().hex}"
    Path("settings.toml").write_text(
        f'[store]\nkind = "dynamodb"\ntable = "{name}"\nregion = "eu-west-1"\nendpoint_url = "{dynamodb.url}"\n'
    )
    return name


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["store", *arguments])


def test_migrate_creates_the_table_once_and_it_stores_records(name: str) -> None:
    first, second = typed("migrate"), typed("migrate", "--json")

    assert first.exit_code == 0, first.stderr
    assert f"create table {name}" in first.stdout
    assert json.loads(second.stdout) == {"kind": "dynamodb", "migrated": []}
    assert asyncio.run(reserved())


async def reserved() -> bool:
    async with open_store(load_settings().store, key_prefix="idempotency") as store:
        (verdict,) = await store.reserve([wish("k")])
        return isinstance(verdict, Reserved)


def test_a_dynamodb_store_has_no_sql() -> None:
    answer = typed("sql")

    assert answer.exit_code == 2
    assert 'a store of kind "dynamodb" does not use SQL' in answer.stderr


def test_a_dynamodb_store_needs_no_purge() -> None:
    as_text, as_json = typed("purge"), typed("purge", "--json")

    assert (as_text.exit_code, as_json.exit_code) == (0, 0)
    assert "DynamoDB deletes expired records itself" in as_text.stdout
    assert json.loads(as_json.stdout) == {"kind": "dynamodb", "purged": 0}


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [module for module in sys.modules if module.startswith("integr8s_idem.stores.dynamodb")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "aiobotocore.config", None)

    answer = typed("migrate")

    assert answer.exit_code == 1
    assert 'pip install "integr8s-idem[dynamodb]"' in answer.stderr
