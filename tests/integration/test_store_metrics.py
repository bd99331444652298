"""Calls to real stores are measured, with the name of the database as the conventions spell it."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from integr8s_idem import IdempotencyManager
from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from tests.support.homes import KINDS, open_home, open_records

SYSTEMS = {
    "redis": "redis",
    "redis-cluster": "redis",
    "redis-sentinel": "redis",
    "postgresql": "postgresql",
    "mysql": "mariadb",
    "sqlite": "sqlite",
    "dynamodb": "aws.dynamodb",
}
"""`db.system.name` by kind of store; the server of the kind mysql is a MariaDB."""
UNADDRESSED = {"redis-cluster", "redis-sentinel", "sqlite"}
"""Kinds whose server is not known, or that have none."""


async def receipt() -> str:
    return "receipt-1"


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_to_a_store_name_its_database(kind: str, tmp_path: Path) -> None:
    if why := KINDS[kind].missing():
        pytest.skip(why)
    registry = CollectorRegistry()
    observer = PrometheusObserver("billing", registry)

    with open_home(kind) as home:
        async with open_records(home.settings(tmp_path), "metrics") as store:
            manager = IdempotencyManager(IdempotencyConfig(key_prefix="metrics"), store, observer, scope="billing")
            await manager.run("order:1", receipt)
            await manager.close()

    found = [
        sample.labels
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "db_client_operation_duration_seconds_count"
    ]
    assert {labels["db_query_summary"] for labels in found} == {"reserve", "complete"}
    assert {labels["db_system_name"] for labels in found} == {SYSTEMS[kind]}
    assert not any("error_type" in labels for labels in found)
    assert all(("server_address" in labels) is (kind not in UNADDRESSED) for labels in found), found
