"""Names of handlers, which are part of their keys."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from integr8s_idem import BaseEvent, EventRouter, IdempotentEventHandler
from integr8s_idem.errors import ApplicationError
from tests.support.guarded import plain_manager


class Placed(BaseEvent):
    event_type: Literal["placed"] = "placed"


async def handle(event: Placed) -> None: ...


@pytest.mark.parametrize("name", [3, b"charge", "", " ", "charge\n", "\x00", "a\u200bb\x1b[31m", ["charge"]])
def test_an_invalid_name_is_refused_before_the_handler_is_registered(name: Any) -> None:
    message = "^name is .*, but must be a string that is not empty and contains no control characters"
    with pytest.raises(ApplicationError, match=message):
        EventRouter().on(Placed, name=name)
    with pytest.raises(ApplicationError, match=message):
        EventRouter().on_batch(Placed, name=name)
    with pytest.raises(ApplicationError, match=message):
        IdempotentEventHandler(handle, plain_manager(), name=name)


@pytest.mark.parametrize("name", ["charge", "charge the card", "billing:charge", "заказ"])
def test_other_names_are_accepted(name: str) -> None:
    router = EventRouter()
    router.on(Placed, name=name)(handle)

    assert [handler.name for handler in router.handlers] == [name]
