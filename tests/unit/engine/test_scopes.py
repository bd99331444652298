"""Managers of several scopes: `in_scope` returns one for each scope, wherever it is requested."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import ApplicationError
from integr8s_idem.records import IdempotencyStatus
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import Guarded, Job, guarded


def test_a_scope_has_one_manager_wherever_it_is_requested() -> None:
    first = guarded(scope="a").manager
    second = first.in_scope("b")
    third = second.in_scope("c")

    for manager in (first, second, third):
        assert [manager.in_scope(scope) for scope in "abc"] == [first, second, third]


@virtual_time
async def test_a_key_deleted_through_another_scope_is_removed_from_the_cache() -> None:
    here, job = guarded(scope="a", local_memory_keys=10), Job()
    await here.manager.run("order:1", job)

    await here.manager.in_scope("b").in_scope("a").delete("order:1")
    await here.manager.run("order:1", job)

    assert job.runs == 2


@virtual_time
async def test_a_run_that_requests_its_own_key_through_another_scope_is_refused() -> None:
    manager = guarded(scope="a").manager

    async def outer() -> Any:
        return await manager.in_scope("b").in_scope("a").run("order:1", Job())

    with pytest.raises(ApplicationError, match="within its own run"):
        await manager.run("order:1", outer)


@virtual_time
async def test_the_attempt_of_a_run_is_found_through_the_manager_of_another_scope() -> None:
    manager = guarded(scope="a").manager
    other = manager.in_scope("b")

    async def keys(asked: IdempotencyManager) -> str:
        return asked.attempt().key

    assert await manager.run("1", lambda: keys(other)) == manager.space.full(manager.space.key("1"))
    assert await other.run("2", lambda: keys(manager)) == other.space.full(other.space.key("2"))
    assert await other.run("3", lambda: keys(manager.in_scope("c"))) == other.space.full(other.space.key("3"))


def test_a_given_owner_is_that_of_all_scopes() -> None:
    assert guarded(scope="a", owner="node 7").manager.in_scope("b").in_scope("c").owner == "node 7"
    assert guarded(scope="a").manager.in_scope("b").owner.startswith("b@")


async def leave_an_unwritten_outcome(here: Guarded, manager: IdempotencyManager) -> None:
    """Run work whose outcome is written in the background once the store answers."""
    here.store.down = {"complete"}
    running = asyncio.create_task(manager.run("order:1", Job()))
    await asyncio.sleep(1)
    running.cancel()
    await asyncio.wait({running})
    here.store.down = set()


@virtual_time
async def test_closing_a_manager_closes_those_that_it_made() -> None:
    here = guarded(scope="a")
    third = here.manager.in_scope("b").in_scope("c")
    await leave_an_unwritten_outcome(here, third)

    await here.manager.close()

    record = await third.get("order:1")
    assert record is not None
    assert record.status is IdempotencyStatus.COMPLETED


@virtual_time
async def test_closing_a_manager_does_not_close_the_one_that_made_it() -> None:
    here = guarded(scope="a")
    running = asyncio.create_task(here.manager.run("order:1", Job(seconds=300)))
    await asyncio.sleep(1)

    other = here.manager.in_scope("b")
    other.in_scope("a")

    await other.close()

    assert await running == "receipt-1", "its lease is renewed"
