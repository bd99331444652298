"""What the store in DynamoDB knows of the time: seconds by the answers, counted on by a clock that nobody sets."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest

from integr8s_idem.errors import StoreConfigurationError
from integr8s_idem.stores.dynamodb.clock import SECOND, ServerClock

AHEAD = 1_900_000_000 * SECOND
"""Of DynamoDB's clock before the one that nobody sets."""


class World:
    """Both clocks, and answers on their way."""

    def __init__(self) -> None:
        self.ticks = 0
        self.ahead = AHEAD
        self.clock = ServerClock(lambda: self.ticks)

    @property
    def truth(self) -> int:
        return self.ticks + self.ahead

    def answer(self, there: int = 0, back: int = 0) -> None:
        """One request, so many microseconds on its way there, and back."""
        sent = self.ticks
        self.ticks += there
        date = formatdate(self.truth // SECOND, usegmt=True)
        self.ticks += back
        self.clock.observe(date, sent)

    def room(self) -> int:
        return self.clock.latest() - self.clock.earliest()


def test_the_truth_lies_between_the_two_after_one_answer() -> None:
    world = World()

    world.answer(there=30_000, back=10_000)

    assert world.clock.earliest() <= world.truth <= world.clock.latest()
    assert world.room() == SECOND + 40_000


def test_answers_narrow_it_to_some_milliseconds_and_never_past_the_truth() -> None:
    world, chance = World(), random.Random(7)
    for _ in range(200):
        world.ticks += chance.randrange(SECOND)
        world.answer(there=chance.randrange(1, 3_000), back=chance.randrange(1, 3_000))

        assert world.clock.earliest() <= world.truth <= world.clock.latest()

    assert world.room() < 50_000


def test_a_long_silence_makes_it_less_sure() -> None:
    world = World()
    world.answer()

    world.ticks += 3_600 * SECOND

    assert world.room() == pytest.approx(SECOND + 2 * 0.72 * SECOND, rel=0.01)


@pytest.mark.parametrize("jump", [-3_600 * SECOND, -5 * SECOND, 5 * SECOND, 3_600 * SECOND])
def test_after_a_jump_the_newest_answer_is_right(jump: int) -> None:
    world = World()
    world.answer(there=1_000, back=1_000)

    world.ahead += jump
    world.answer(there=1_000, back=1_000)

    assert world.clock.earliest() <= world.truth <= world.clock.latest()
    assert world.room() == SECOND + 2_000


def test_nothing_is_known_before_the_first_answer() -> None:
    world = World()
    assert not world.clock.known

    world.answer()

    assert world.clock.known


def test_an_answer_without_a_date_is_refused() -> None:
    with pytest.raises(StoreConfigurationError, match="carry no Date"):
        World().clock.observe(None, 0)
