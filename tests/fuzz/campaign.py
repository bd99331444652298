"""The campaign `fuzz`: numbered hostile inputs for everything that reads external data."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.fuzz.events import decoded, with_headers
from tests.fuzz.keys import canonical, keyed
from tests.fuzz.settings import configured
from tests.fuzz.stored import recorded, resulted

LONGEST_SECONDS: Final = 3.0
"""Maximum CPU time of this thread per input."""
_OFTEN: Final[tuple[Callable[[Random], Figures], ...]] = (decoded, recorded, keyed, canonical, resulted, with_headers)
_ONE_IN: Final = 50
"""Loading settings takes a hundred times as long as the other targets, so only one input in this many is for them."""


def input_numbered(number: int) -> Figures:
    """Test an input.

    Raises:
        ViolationError: A property did not hold; the message names the number.
    """
    random = Random(number)
    target = configured if number % _ONE_IN == 0 else _OFTEN[number % len(_OFTEN)]
    began = time.thread_time()
    try:
        figures = target(random)
    except Exception as error:
        raise ViolationError(f"input {number} ({target.__name__}): {type(error).__name__}: {error!s:.2000}") from error
    took = time.thread_time() - began
    if took > LONGEST_SECONDS:
        raise ViolationError(f"input {number} ({target.__name__}) took {took:.1f} s")
    figures["inputs"] = 1
    return figures


def run(first: int, count: int) -> Figures:
    """Test the inputs `first` to `first + count - 1`."""
    total = Figures()
    for number in range(first, first + count):
        total.update(input_numbered(number))
    return total


CAMPAIGN: Final = Campaign(
    name="fuzz",
    counts="inputs",
    says="one damaged or hostile message, header, key, payload, record, result or settings file",
    scenarios=(81, 82, 83, 85, 86, 88, 91, 92, 94, 95, 96),
    in_test=20_000,
    target=1_000_000,
    batch=60_000,
    run=run,
)
