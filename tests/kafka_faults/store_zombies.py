"""Campaign `zombies-sql`: the zombies of `tests.kafka_faults.zombies`, with records in databases."""

from __future__ import annotations

from functools import partial
from typing import Final

from tests.campaigns.figures import Campaign
from tests.kafka_faults import zombies

KINDS: Final = ("postgresql", "sqlite")
"""Any of `tests.support.homes`."""

OF_A_KIND: Final = 60

CAMPAIGN: Final = Campaign(
    name="zombies-sql",
    counts="zombies",
    says="a worker with records in a real PostgreSQL or SQLite is stopped (SIGSTOP) beyond its lease and its session, "
    "another one finishes, then it goes on",
    scenarios=(33, 35, 36, 38),
    in_test=2 * len(KINDS),
    target=OF_A_KIND * len(KINDS),
    # Each pair has each kind of zombie once.
    batch=14 * len(KINDS),
    run=partial(zombies.run, kinds=KINDS),
)
