"""The clock of the DynamoDB store: derived from response dates, and advanced by a monotonic clock."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest

from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores.dynamodb.clock import SECOND, ServerClock

OFFSET = 1_900_000_000 * SECOND
"""Offset of DynamoDB's clock to the monotonic clock."""


class World:
    """Simulates both clocks and the delays of requests."""

    def __init__(self) -> None:
        self.ticks = 0
        self.offset = OFFSET
        self.clock = ServerClock(lambda: self.ticks)

    @property
    def server_time(self) -> int:
        return self.ticks + self.offset

    def respond(self, there: int = 0, back: int = 0) -> None:
        """Simulate a request that takes `there` microseconds to the server and `back` microseconds back."""
        sent = self.ticks
        self.ticks += there
        date = formatdate(self.server_time // SECOND, usegmt=True)
        self.ticks += back
        self.clock.observe(date, sent)

    def uncertainty(self) -> int:
        return self.clock.latest() - self.clock.earliest()


def test_one_response_bounds_the_server_time() -> None:
    world = World()

    world.respond(there=30_000, back=10_000)

    assert world.clock.earliest() <= world.server_time <= world.clock.latest()
    assert world.uncertainty() == SECOND + 40_000


def test_more_responses_narrow_the_interval_to_milliseconds() -> None:
    world, rng = World(), random.Random(7)
    for _ in range(200):
        world.ticks += rng.randrange(SECOND)
        world.respond(there=rng.randrange(1, 3_000), back=rng.randrange(1, 3_000))

        assert world.clock.earliest() <= world.server_time <= world.clock.latest()

    assert world.uncertainty() < 50_000


def test_the_interval_grows_without_responses() -> None:
    world = World()
    world.respond()

    world.ticks += 3_600 * SECOND

    assert world.uncertainty() == pytest.approx(SECOND + 2 * 0.72 * SECOND, rel=0.01)


@pytest.mark.parametrize("jump", [-3_600 * SECOND, -5 * SECOND, 5 * SECOND, 3_600 * SECOND])
def test_the_latest_response_counts_after_a_clock_jump(jump: int) -> None:
    world = World()
    world.respond(there=1_000, back=1_000)

    world.offset += jump
    world.respond(there=1_000, back=1_000)

    assert world.clock.earliest() <= world.server_time <= world.clock.latest()
    assert world.uncertainty() == SECOND + 2_000


def test_the_clock_is_unknown_before_the_first_response() -> None:
    world = World()
    assert not world.clock.known

    world.respond()

    assert world.clock.known


def test_a_response_without_a_date_is_refused() -> None:
    with pytest.raises(StoreConfigurationError, match="have no Date"):
        World().clock.observe(None, 0)
