"""Reservations that callers settle themselves: what the methods of the manager accept, and what they record."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from integr8s_idem.config.durations import Duration
from integr8s_idem.engine.error_text import LONGEST_ERROR
from integr8s_idem.engine.manager import IdempotencyManager
from integr8s_idem.errors import ApplicationError
from integr8s_idem.keys import Key
from integr8s_idem.records import Completion, KeyReused, Reserved
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import LEASE, guarded


async def reserved_by(manager: IdempotencyManager, key: str = "order:1") -> Reserved:
    verdict = await manager.reserve(key)
    assert isinstance(verdict, Reserved)
    return verdict


@virtual_time
async def test_the_error_of_a_failure_is_recorded_as_one_short_line_without_credentials() -> None:
    here = guarded()
    text = "no stock:\n  redis://user:secret@cache/0\t" + "e" * 70_000

    assert await here.manager.fail(await reserved_by(here.manager), text)

    error = (await here.record()).error
    assert error is not None
    assert len(error) == LONGEST_ERROR
    assert error.startswith("no stock: redis://")
    assert "secret" not in error
    assert error.endswith("e…")


@virtual_time
async def test_a_short_error_of_a_failure_is_recorded_unchanged() -> None:
    here = guarded()

    await here.manager.fail(await reserved_by(here.manager), "no stock: 3 of 4")

    assert (await here.record()).error == "no stock: 3 of 4"


CALLS: list[tuple[str, Callable[[IdempotencyManager, Any], Awaitable[Any]]]] = [
    ("complete", lambda manager, value: manager.complete(value)),
    ("fail", lambda manager, value: manager.fail(value, "no stock")),
    ("renew", lambda manager, value: manager.renew(value)),
    ("release", lambda manager, value: manager.release(value)),
    ("may_start", lambda manager, value: manager.may_start(value)),
]


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_a_verdict_that_is_not_reserved_is_rejected_by_name(
    name: str, call: Callable[[IdempotencyManager, Any], Awaitable[Any]]
) -> None:
    @virtual_time
    async def main() -> None:
        here = guarded()
        await here.manager.reserve("order:1")
        verdict = await here.manager.reserve("order:1")
        with pytest.raises(ApplicationError, match=rf"{name} takes a Reserved verdict .*, not InProgress"):
            await call(here.manager, verdict)

    main()


@virtual_time
async def test_a_completion_of_a_verdict_that_is_not_reserved_is_rejected() -> None:
    with pytest.raises(ApplicationError, match=r"completion takes a Reserved verdict .*, not NoneType"):
        guarded().manager.completion(cast(Any, None))


@virtual_time
async def test_batch_methods_reject_a_single_reservation_or_key() -> None:
    manager = guarded().manager
    reserved: Any = await reserved_by(manager)

    with pytest.raises(ApplicationError, match=r"write confirm_batch\(\[reserved\]\), or use complete for one"):
        await manager.confirm_batch(reserved)
    with pytest.raises(ApplicationError, match=r"write release_batch\(\[reserved\]\), or use release for one"):
        await manager.release_batch(reserved)
    for key in ("abc", Key.of("abc")):
        with pytest.raises(ApplicationError, match=r"write reserve_many\(\[key\]\), or use reserve for one key"):
            await manager.reserve_many(cast(Any, key))


@virtual_time
async def test_two_keys_of_the_same_record_are_reserved_once_and_have_the_same_verdict() -> None:
    here = guarded()
    key = here.manager.space.key("order:1")

    keys: list[str | Key] = ["order:1", key, "order:2"]

    verdicts = await here.manager.acquire_batch(keys)

    assert list(verdicts) == keys
    assert len(here.store.requests) == 2
    assert isinstance(verdicts["order:1"], Reserved)
    assert verdicts["order:1"] is verdicts[key]
    reserved = [verdict for verdict in verdicts.values() if isinstance(verdict, Reserved)]
    assert await here.manager.release_batch(reserved) == [True, True, True]


@virtual_time
async def test_two_keys_of_the_same_record_with_different_payloads_have_their_own_verdicts() -> None:
    manager = guarded().manager
    keys: list[str | Key] = ["order:1", manager.space.key("order:1")]

    verdicts = await manager.acquire_batch(
        keys, fingerprint=lambda each: (b"1" if isinstance(each, Key) else b"2") * 16
    )

    assert [type(verdict) for verdict in verdicts.values()] == [Reserved, KeyReused]


@pytest.mark.parametrize("ttl", [0, 1, LEASE - 1])
def test_a_ttl_shorter_than_the_lease_is_rejected_by_all_methods(ttl: Duration) -> None:
    @virtual_time
    async def main() -> None:
        here = guarded()
        reserved = await reserved_by(here.manager)
        short = here.manager.completion(reserved)
        short = Completion(reservation=reserved, ttl=short.ttl * 0)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: here.manager.complete(reserved, ttl=ttl),
            lambda: here.manager.fail(reserved, "no stock", ttl=ttl),
            lambda: here.manager.confirm_batch([reserved], ttl=ttl),
            lambda: here.manager.complete_many([short]),
        ]
        for call in calls:
            with pytest.raises(ApplicationError, match="is shorter than the lease of 30 s"):
                await call()
        with pytest.raises(ApplicationError, match="is shorter than the lease of 30 s"):
            here.manager.completion(reserved, ttl=ttl)

        assert await here.manager.complete(reserved, ttl=LEASE)

    main()
