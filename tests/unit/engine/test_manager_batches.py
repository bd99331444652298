"""Batches of keys: acquiring, confirming and releasing them, and the offsets that may be committed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

import pytest

from integr8s_idem import committable_offsets
from integr8s_idem.errors import ApplicationError, PartialFailureError, StoreUnavailableError
from integr8s_idem.keys import Key
from integr8s_idem.records import Completed, InProgress, KeyReused, Reserved, Verdict
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import guarded


def _reserved(verdicts: dict[str, Verdict]) -> list[Reserved]:
    return [verdict for verdict in verdicts.values() if isinstance(verdict, Reserved)]


@virtual_time
async def test_many_keys_are_acquired_confirmed_and_released_in_one_round_trip_each() -> None:
    here = guarded()
    verdicts = await here.manager.acquire_batch([f"order:{number}" for number in range(100)])
    reservations = _reserved(verdicts)
    assert list(verdicts) == [f"order:{number}" for number in range(100)]
    assert len(reservations) == 100

    assert await here.manager.confirm_batch(reservations[:60]) == [True] * 60
    assert await here.manager.release_batch(reservations[60:]) == [True] * 40

    assert (here.store.calls["reserve"], here.store.calls["complete"], here.store.calls["release"]) == (1, 1, 1)
    again = await here.manager.acquire_batch([f"order:{number}" for number in range(100)])
    assert [type(verdict) for verdict in again.values()] == [Completed] * 60 + [Reserved] * 40
    assert {verdict.attempt for verdict in _reserved(again)} == {2}


@virtual_time
async def test_a_repeated_key_is_reserved_once() -> None:
    here = guarded()
    verdicts = await here.manager.acquire_batch(["a", "b", "a", "a"])
    assert list(verdicts) == ["a", "b"]
    assert len(_reserved(verdicts)) == 2
    assert len(here.store.requests) == 2


@virtual_time
async def test_the_verdicts_of_a_batch_distinguish_all_states() -> None:
    here = guarded()
    other = guarded(here.store)
    await other.manager.reserve("running")
    done = await other.manager.reserve("done", fingerprint=b"1" * 16)
    assert isinstance(done, Reserved)
    await other.manager.complete(done, "receipt")

    marks = {"done": b"1" * 16}
    verdicts = await here.manager.acquire_batch(["running", "done", "new"], fingerprint=marks.get)

    assert [type(verdict) for verdict in verdicts.values()] == [InProgress, Completed, Reserved]
    reused = await here.manager.acquire_batch(["done"], fingerprint=lambda _: b"2" * 16)
    assert isinstance(reused["done"], KeyReused)


@virtual_time
async def test_confirmed_results_are_stored() -> None:
    here = guarded()
    reservations = _reserved(await here.manager.acquire_batch(["a", "b"]))
    await here.manager.confirm_batch({reservations[0]: "receipt-a", reservations[1]: None}, ttl=timedelta(hours=1))

    async def never() -> str | None:
        raise AssertionError

    assert await here.manager.run("a", never) == "receipt-a"
    assert await here.manager.run("b", never) is None


@virtual_time
async def test_reservations_taken_over_are_neither_confirmed_nor_released() -> None:
    here = guarded()
    other = guarded(here.store)
    reservations = _reserved(await here.manager.acquire_batch(["a", "b"]))
    await asyncio.sleep(31)
    taken = _reserved(await other.manager.acquire_batch(["a"]))

    assert await here.manager.confirm_batch(reservations) == [False, True]
    assert await here.manager.release_batch(reservations[:1]) == [False]
    assert await other.manager.confirm_batch(taken) == [True]


@virtual_time
async def test_a_ttl_shorter_than_the_lease_is_rejected() -> None:
    here = guarded()
    reservations = _reserved(await here.manager.acquire_batch(["a"]))
    with pytest.raises(ApplicationError, match="a ttl of 1 s is shorter than the lease"):
        await here.manager.confirm_batch(reservations, ttl=timedelta(seconds=1))


@virtual_time
async def test_confirming_again_after_a_lost_answer_is_safe() -> None:
    here = guarded()
    reservations = _reserved(await here.manager.acquire_batch(["a", "b"]))
    here.store.lose_answers["complete"] = 1
    with pytest.raises(StoreUnavailableError):
        await here.manager.confirm_batch(reservations)
    assert await here.manager.confirm_batch(reservations) == [True, True]


@virtual_time
async def test_empty_batches_make_no_round_trip() -> None:
    here = guarded()
    assert await here.manager.acquire_batch([]) == {}
    assert await here.manager.confirm_batch([]) == []
    assert await here.manager.release_batch([]) == []
    assert not here.store.calls


@virtual_time
async def test_batches_accept_resolved_keys() -> None:
    here = guarded()
    key = Key.of("order:1")
    assert isinstance((await here.manager.acquire_batch([key]))[key], Reserved)


@dataclass(frozen=True)
class Record:
    topic: str
    partition: int
    offset: int


def _records(topic: str, partition: int, *offsets: int) -> list[Record]:
    return [Record(topic, partition, offset) for offset in offsets]


@pytest.mark.parametrize(
    ("undone", "offset"),
    [(set(), 9), ({7}, 7), ({8}, 8), ({5}, 5), ({5, 7}, 5), ({3}, None)],
)
def test_offsets_up_to_the_first_unfinished_record_may_be_committed(undone: set[int], offset: int | None) -> None:
    records = _records("orders", 0, 3, 5, 7, 8)
    found = committable_offsets(reversed(records), {("orders", 0, each) for each in undone})
    assert found == ({} if offset is None else {("orders", 0): offset})


def test_partitions_do_not_block_each_other() -> None:
    records = [*_records("orders", 0, 1, 2), *_records("orders", 1, 1, 2), *_records("bills", 0, 8)]
    assert committable_offsets(records, {("orders", 1, 1)}) == {("orders", 0): 3, ("bills", 0): 9}
    assert committable_offsets([], set()) == {}


@virtual_time
async def test_batch_methods_reject_other_verdicts_by_name() -> None:
    here = guarded()
    other = guarded(here.store)
    await other.manager.acquire_batch(["order:1"])
    verdicts = await here.manager.acquire_batch(["order:1"])

    with pytest.raises(ApplicationError, match="takes several keys"):
        await here.manager.acquire_batch("order:1")
    with pytest.raises(
        ApplicationError, match=r"confirm_batch takes the Reserved verdicts of acquire_batch, not InProgress"
    ):
        await here.manager.confirm_batch(verdicts.values())  # type: ignore[arg-type]
    with pytest.raises(
        ApplicationError, match=r"release_batch takes the Reserved verdicts of acquire_batch, not InProgress"
    ):
        await here.manager.release_batch(verdicts.values())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="failures must map indexes"):
        PartialFailureError(["no stock"])  # type: ignore[arg-type]


@virtual_time
async def test_a_reservation_that_is_confirmed_twice_has_two_answers() -> None:
    manager = guarded().manager
    reserved = await manager.acquire_batch(["order:1", "order:2"])
    one, two = reserved.values()
    assert isinstance(one, Reserved)
    assert isinstance(two, Reserved)

    assert await manager.confirm_batch([one, two, one]) == [True, True, True]
