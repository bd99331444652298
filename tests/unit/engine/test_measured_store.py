"""Durations of calls to a store, by the database conventions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry

from integr8s_idem.config import IdempotencyConfig
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.engine.measured_store import measured
from integr8s_idem.errors import StoreUnavailableError
from integr8s_idem.records import Database
from integr8s_idem.stores import IdempotencyRepository, PurgeSupport
from integr8s_idem.stores.memory import MemoryIdempotencyRepository
from integr8s_idem.telemetry import SILENT
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from integr8s_idem.testing.flaky_store import FlakyStore
from integr8s_idem.testing.virtual_time import virtual_now, virtual_time

COUNT = "db_client_operation_duration_seconds_count"
REDIS = Database("redis", "3", "cache.example", 6380)


class DatabaseInMemory(FlakyStore):
    """A store that says which database it is."""

    def __init__(self, database: Database = REDIS) -> None:
        super().__init__(MemoryIdempotencyRepository(clock=virtual_now))
        self.database = database


class Purged(DatabaseInMemory):
    purge_every = timedelta(minutes=1)

    async def purge(self, most: int = 500) -> int:
        return most


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def manager_of(store: IdempotencyRepository, registry: CollectorRegistry, scope: str = "billing") -> IdempotencyManager:
    return IdempotencyManager(IdempotencyConfig(), store, PrometheusObserver("billing", registry), scope=scope)


def calls(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return the number of measured calls by operation and error."""
    return {
        (sample.labels["db_query_summary"], sample.labels.get("error_type", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == COUNT
    }


async def receipt() -> str:
    return "receipt-1"


@virtual_time
async def test_each_call_is_measured_with_the_labels_of_the_database_conventions(registry: CollectorRegistry) -> None:
    manager = manager_of(DatabaseInMemory(), registry)

    await manager.run("order:1", receipt)

    labels = {
        "service": "billing",
        "db_system_name": "redis",
        "db_namespace": "3",
        "server_address": "cache.example",
        "server_port": "6380",
    }
    assert registry.get_sample_value(COUNT, labels | {"db_query_summary": "reserve"}) == 1
    assert registry.get_sample_value(COUNT, labels | {"db_query_summary": "complete"}) == 1


@virtual_time
async def test_a_batch_is_one_call(registry: CollectorRegistry) -> None:
    manager = manager_of(DatabaseInMemory(), registry)

    verdicts = await manager.acquire_batch([f"order:{number}" for number in range(50)])
    await manager.release_batch(verdicts.values())  # type: ignore[arg-type]

    assert calls(registry) == {("reserve", ""): 1, ("release", ""): 1}


@virtual_time
async def test_every_operation_of_a_manager_and_its_other_scopes_is_measured(registry: CollectorRegistry) -> None:
    manager = manager_of(DatabaseInMemory(), registry)

    reserved = await manager.reserve("order:1")
    await manager.renew(reserved)  # type: ignore[arg-type]
    await manager.fail(reserved, "refused")  # type: ignore[arg-type]
    await manager.in_scope("audit").get("order:1")
    await manager.count_active()
    await manager.delete("order:1")
    await manager.measured_repository.ping()

    operations = ("reserve", "renew", "fail", "get", "count_active", "delete", "ping")
    # Steps are deleted before their unit.
    assert calls(registry) == {(operation, ""): 2 if operation == "delete" else 1 for operation in operations}


@virtual_time
async def test_a_failed_call_has_the_type_of_its_error_which_is_raised(registry: CollectorRegistry) -> None:
    store = DatabaseInMemory()
    store.down.add("reserve")

    with pytest.raises(StoreUnavailableError):
        await manager_of(store, registry).reserve("order:1")

    assert calls(registry) == {("reserve", "integr8s_idem.errors.StoreUnavailableError"): 1}


@virtual_time
async def test_a_cancelled_call_is_measured_until_its_cancellation(registry: CollectorRegistry) -> None:
    class Hanging(DatabaseInMemory):
        async def count_active(self, prefix: str) -> int:
            await asyncio.sleep(1_000)
            return 0

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await manager_of(Hanging(), registry).count_active()

    assert calls(registry) == {("count_active", "asyncio.exceptions.CancelledError"): 1}


@virtual_time
async def test_a_store_may_learn_from_its_first_connection_which_database_it_uses(registry: CollectorRegistry) -> None:
    store = DatabaseInMemory(Database("mysql"))
    manager = manager_of(store, registry)

    store.database = Database("mariadb")
    await manager.reserve("order:1")
    store.database = replace_system(store.database, "unknown")
    await manager.reserve("order:2")

    labels = {"service": "billing", "db_system_name": "mariadb", "db_query_summary": "reserve"}
    assert registry.get_sample_value(COUNT, labels) == 2


def replace_system(database: Database, system: str) -> Database:
    return database._replace(system=system)


def test_without_metrics_the_store_is_called_directly() -> None:
    store = DatabaseInMemory()

    assert measured(store, SILENT) is store
    assert IdempotencyManager(IdempotencyConfig(), store, scope="billing").measured_repository is store


def test_a_store_without_a_database_is_called_directly(registry: CollectorRegistry) -> None:
    store = MemoryIdempotencyRepository()

    assert measured(store, PrometheusObserver("billing", registry)) is store


def test_the_repository_of_a_manager_keeps_its_class(registry: CollectorRegistry) -> None:
    store = DatabaseInMemory()

    manager = manager_of(store, registry)

    assert manager.repository is store
    assert isinstance(manager.measured_repository, IdempotencyRepository)
    assert not isinstance(manager.measured_repository, PurgeSupport)


async def test_purges_are_measured(registry: CollectorRegistry) -> None:
    found = manager_of(Purged(), registry).measured_repository

    assert isinstance(found, PurgeSupport)
    assert found.purge_every == timedelta(minutes=1)
    assert await found.purge(7) == 7
    assert calls(registry) == {("purge", ""): 1}


@virtual_time
async def test_scans_pass_through(registry: CollectorRegistry) -> None:
    manager = manager_of(DatabaseInMemory(), registry)
    await manager.run("order:1", receipt)

    found: AsyncIterator[object] = manager.measured_repository.scan("")

    assert len([record async for record in found]) == 1
    assert ("scan", "") not in calls(registry)


async def test_the_number_of_error_types_is_bounded(registry: CollectorRegistry) -> None:
    timer = PrometheusObserver("billing", registry).store_timer(lambda: REDIS)
    assert timer is not None

    for number in range(300):
        timer("reserve", 0.0, type(f"Error{number}", (Exception,), {})())

    assert len(calls(registry)) < 50
