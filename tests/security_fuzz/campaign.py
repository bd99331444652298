"""The campaign `security-fuzz`: numbered inputs of an attacker."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from typing import Final

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.fuzz.stored import recorded
from tests.security_fuzz.headers import forged, signed
from tests.security_fuzz.keys import distinct
from tests.security_fuzz.output import shown
from tests.security_fuzz.requests import asked
from tests.security_fuzz.responses import replayed

LONGEST_SECONDS: Final = 3.0
"""Maximum CPU time of this thread per input."""
_TARGETS: Final[tuple[Callable[[Random], Figures], ...]] = (forged, signed, distinct, recorded, replayed, asked, shown)


def input_numbered(number: int) -> Figures:
    """Test an input.

    Raises:
        ViolationError: A property did not hold; the message names the number.
    """
    random = Random(number)
    target = _TARGETS[number % len(_TARGETS)]
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
    name="security-fuzz",
    counts="inputs",
    says="one forged header, key, record, stored response, HTTP request, or text shown by a command",
    scenarios=(123, 124, 125, 128, 130, 133, 136),
    in_test=14_000,
    target=1_000_000,
    batch=50_000,
    run=run,
)
