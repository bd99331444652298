"""What the consumer does.  It does not change with the adoption."""

from __future__ import annotations

charges: list[tuple[str, int]] = []
"""Number and cents of each order that was charged."""


async def charge(number: str, cents: int) -> None:
    charges.append((number, cents))
