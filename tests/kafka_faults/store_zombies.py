"""Campaign `zombies-stores`: the zombies of `tests.kafka_faults.zombies` with records in other stores."""

from __future__ import annotations

from functools import partial
from typing import Final

from tests.campaigns.figures import Campaign
from tests.kafka_faults import zombies
from tests.support.homes import at_hand

ALL: Final = ("postgresql", "sqlite", "mysql", "redis-cluster", "redis-sentinel", "dynamodb")
KINDS: Final = at_hand(*ALL)

OF_A_KIND: Final = 60

CAMPAIGN: Final = Campaign(
    name="zombies-stores",
    counts="zombies",
    says="a worker with records in a real PostgreSQL, SQLite, MariaDB, Redis Cluster, Redis with Sentinels, or in "
    "DynamoDB Local is stopped (SIGSTOP) for longer than its lease and session, another one finishes, then it resumes",
    scenarios=(33, 35, 36, 38),
    in_test=2 * len(KINDS),
    target=OF_A_KIND * len(KINDS),
    on_page=(2 * len(ALL), OF_A_KIND * len(ALL)),
    # Each pair runs each kind of zombie once.
    batch=14 * len(KINDS),
    run=partial(zombies.run, kinds=KINDS),
)
