"""Two versions of one event, as deployed code has them side by side: the later one has an optional field more."""

from __future__ import annotations

from typing import Literal

from integr8s_idem.events import BaseEvent


class OrderPlaced(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"


class OrderPlacedLater(BaseEvent):
    event_type: Literal["order_placed"] = "order_placed"
    order_id: str = "1"
    coupon: str | None = None
