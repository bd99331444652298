"""A payment gateway that is down for some customers at their first tries."""

from __future__ import annotations

import asyncio
from typing import Final, Literal, TypeAlias

from integr8s_idem import BaseEvent

Retries: TypeAlias = Literal["block", "overtake"]
"""What happens to later events while one waits for its retry."""


class ChargeRequested(BaseEvent):
    event_type: Literal["charge_requested"] = "charge_requested"
    number: int


class GatewayDownError(Exception):
    """The gateway did not take the charge; it can be tried again."""


class Gateway:
    """Declines one charge in `DECLINED_ONE_IN` at its first `TRIES` tries."""

    DECLINED_ONE_IN: Final = 50
    TRIES: Final = 2

    def __init__(self) -> None:
        self.charged: list[int] = []
        self._declined: dict[int, int] = {}

    async def charge(self, number: int) -> None:
        """Charge an order.

        Raises:
            GatewayDownError: Try again later.
        """
        await asyncio.sleep(0.002)
        declined = self._declined.get(number, 0)
        if number % self.DECLINED_ONE_IN == 0 and declined < self.TRIES:
            self._declined[number] = declined + 1
            raise GatewayDownError(f"order {number} was not charged")
        self.charged.append(number)
