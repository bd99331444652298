"""Serializing and restoring the results of handlers."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, SecretStr, computed_field

from integr8s_idem.engine.results import decode_result, encode_result, return_type_of
from integr8s_idem.errors import ResultDecodeError, ResultDroppedError
from integr8s_idem.records import StoredResult
from integr8s_idem.telemetry import Signal
from integr8s_idem.testing.virtual_time import virtual_time
from tests.support.guarded import Job, guarded


@dataclass
class Receipt:
    number: int
    paid: Decimal


class Order(BaseModel):
    order_id: UUID
    receipts: list[Receipt] = Field(default_factory=list)


class Color(Enum):
    RED = "red"


class Broken(BaseModel):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def secret(self) -> str:
        raise KeyError("no such secret")


RECEIPT = Receipt(1, Decimal("3.50"))
ORDER = Order(order_id=UUID(int=7), receipts=[RECEIPT])


def round_trip(value: object, expected: object = Any) -> Any:
    return decode_result("order:1", encode_result(value), expected)


@pytest.mark.parametrize(
    "value", [None, 0, "", False, [], {}, b"", b"\xff\x00", 2**80, -0.0, 1e300, "é😀\0", [1, [None]]]
)
def test_plain_values_are_restored_unchanged(value: object) -> None:
    again = round_trip(value)

    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (RECEIPT, Receipt),
        (ORDER, Order),
        ([RECEIPT, RECEIPT], list[Receipt]),
        ({"a": ORDER}, dict[str, Order]),
        (None, Receipt | None),
        (None, None),
        ((1, "a"), tuple[int, str]),
        ({1, 2}, set[int]),
        (datetime(2030, 1, 1, tzinfo=UTC), datetime),
        (Color.RED, Color),
        ({1: b"a"}, dict[int, bytes]),
        (5, Annotated[int, Field(gt=1)]),
    ],
    ids=str,
)
def test_typed_values_are_restored_as_the_annotated_type(value: object, expected: object) -> None:
    assert round_trip(value, expected) == value


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_restored(value: float) -> None:
    assert round_trip(value) == value
    assert round_trip(value, float) == value


def test_nan_is_restored() -> None:
    assert math.isnan(round_trip(math.nan))
    assert math.isnan(round_trip([math.nan], list[float])[0])


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))
def test_any_json_value_is_restored(value: object) -> None:
    assert round_trip(value) == value


CYCLE: list[object] = []
CYCLE.append(CYCLE)


def deep() -> object:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.scenario(91)
@pytest.mark.parametrize(
    "value", [object(), CYCLE, lambda: 1, "\ud800", {"a": b"\xff"}, Broken(), deep()],
    ids=["object", "cycle", "function", "surrogate", "bytes inside", "broken model", "deep"],
)  # fmt: skip
@virtual_time
async def test_an_unserializable_result_is_dropped_and_the_work_stays_done(value: object) -> None:
    here, job = guarded(), Job(result=value)

    assert await here.manager.run("order:1", job) is value

    with pytest.raises(ResultDroppedError, match="order:1 is done"):
        await here.manager.run("order:1", job)
    assert job.runs == 1
    assert here.observer.counts[Signal.RESULT_DROPPED] == 1


@pytest.mark.scenario(90)
@virtual_time
async def test_a_result_that_is_too_large_is_dropped_and_duplicates_stay_blocked() -> None:
    here, exact, more = guarded(max_result_size_bytes=10), Job(result="x" * 8), Job(result="x" * 9)

    await here.manager.run("exact", exact)
    await here.manager.run("more", more)

    assert await here.manager.run("exact", exact) == "x" * 8
    with pytest.raises(ResultDroppedError):
        await here.manager.run("more", more)
    assert (exact.runs, more.runs) == (1, 1)


@virtual_time
async def test_without_result_caching_a_duplicate_gets_none_and_no_error() -> None:
    here, job = guarded(enable_result_caching=False), Job()

    assert await here.manager.run("order:1", job) == "receipt-1"
    assert await here.manager.run("order:1", job) is None

    assert job.runs == 1


@pytest.mark.parametrize("value", [None, 0, "", False, [], b""])
@virtual_time
async def test_empty_results_are_replayed(value: object) -> None:
    here, job = guarded(), Job(result=value)
    await here.manager.run("order:1", job)

    again = await here.manager.run("order:1", job)

    assert again == value
    assert type(again) is type(value)
    assert job.runs == 1


@virtual_time
async def test_a_replayed_result_has_the_annotated_type() -> None:
    here = guarded()

    async def charge() -> Receipt:
        return RECEIPT

    await here.manager.run("order:1", charge)

    assert await here.manager.run("order:1", charge) == RECEIPT


@pytest.mark.scenario(95)
@virtual_time
async def test_a_result_that_no_longer_matches_raises_an_error_that_the_work_is_done() -> None:
    here = guarded()

    async def old() -> dict[str, int]:
        return {"number": 1}

    async def new() -> Receipt:
        raise AssertionError("ran again")

    await here.manager.run("order:1", old)

    with pytest.raises(
        ResultDecodeError, match=r"of order:1 does not match Receipt: paid: Field required\. The work is"
    ):
        await here.manager.run("order:1", new)


@pytest.mark.scenario(95)
@pytest.mark.parametrize(
    "stored",
    [
        StoredResult(b"{"),
        StoredResult(b""),
        StoredResult(b"\xff"),
        StoredResult(b"1", "text/plain"),
        StoredResult(b"9" * 5_000),
    ],
)
@pytest.mark.parametrize("expected", [Any, Receipt])
def test_invalid_stored_results_are_decode_errors(stored: StoredResult, expected: object) -> None:
    with pytest.raises(ResultDecodeError):
        decode_result("order:1", stored, expected)


class Opaque:
    """A type that pydantic does not support."""


@pytest.mark.scenario(95)
def test_decode_errors_stay_short_for_long_names() -> None:
    stored = encode_result({"n" * 1_000_000: "x"})

    with pytest.raises(ResultDecodeError) as caught:
        decode_result("order:1", stored, dict[str, int])

    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("expected", [Opaque, Annotated[int, []]])
def test_types_that_pydantic_does_not_support_are_decode_errors(expected: object) -> None:
    try:
        value = round_trip(1, expected)
    except ResultDecodeError:
        return

    assert value == 1


class Charger:
    async def __call__(self, amount: int) -> Receipt:
        return Receipt(amount, Decimal(1))

    async def method(self) -> Receipt:
        return RECEIPT


async def plain() -> Receipt:
    return RECEIPT


async def out_of_reach() -> Missing:  # type: ignore[name-defined]  # noqa: F821
    return RECEIPT


@functools.wraps(plain)
async def wrapped(*args: object) -> Any:
    return await plain()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, Receipt),
        (wrapped, Receipt),
        (functools.partial(plain), Receipt),
        (functools.partial(functools.partial(Charger(), 1)), Receipt),
        (Charger(), Receipt),
        (Charger().method, Receipt),
        (lambda: None, Any),
        (out_of_reach, Any),
    ],
)
def test_the_return_type_of_every_kind_of_callable_is_found(function: Callable[..., object], expected: object) -> None:
    assert return_type_of(function) is expected
    assert return_type_of(function) is expected, "second call"


def test_a_return_type_defined_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def paid() -> Later: ...  # type: ignore[name-defined]  # noqa: F821  # defined later

    assert return_type_of(paid) is Any

    monkeypatch.setitem(globals(), "Later", Receipt)

    assert return_type_of(paid) is Receipt


def test_the_return_type_cache_does_not_keep_functions_alive() -> None:
    def paid() -> int:
        return 1

    gone = weakref.ref(paid)
    assert return_type_of(paid) is int
    del paid

    assert gone() is None


@virtual_time
async def test_a_dropped_result_is_logged_once_with_its_key_and_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = guarded(max_result_size_bytes=10)

    for key in ("order:1", "order:2"):
        await here.manager.run(key, Job(result="x" * 30))

    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "order:1 is not stored" in message
    assert "larger than max_result_size_bytes (10)" in message


class Account(BaseModel):
    owner: str
    password: SecretStr
    notes: str = Field("none", exclude=True)


def test_some_types_do_not_read_their_own_json_back() -> None:
    account = Account(owner="ada", password=SecretStr("hush"), notes="late")

    read: Any = decode_result("k", encode_result(account), Account)
    day: Any = decode_result("k", encode_result(date(2026, 1, 2)), str | date)

    assert (read.owner, read.password.get_secret_value(), read.notes) == ("ada", "**********", "none")
    assert day == "2026-01-02"
