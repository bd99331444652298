"""Requests, verdicts and outcomes are immutable, since many callers share them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec import Struct

from integr8s_idem import records
from integr8s_idem.engine.work import Attempt, Executed
from integr8s_idem.handlers.handler_calls import HandlerCall
from integr8s_idem.keys import Key

STRUCTS = [
    each
    for each in (*vars(records).values(), Key, Attempt, Executed, HandlerCall)
    if isinstance(each, type) and issubclass(each, Struct) and each is not Struct
]


@pytest.mark.parametrize("struct", STRUCTS)
def test_it_is_frozen(struct: type[Struct]) -> None:
    assert struct.__struct_config__.frozen


def test_a_reservation_refuses_assignments() -> None:
    reserved = records.Reserved(key="k", token=b"t" * 16, attempt=1, fence=1, lease=timedelta(seconds=1))

    with pytest.raises(AttributeError, match="immutable"):
        reserved.fence = 2  # type: ignore[misc]
