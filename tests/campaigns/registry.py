"""All campaigns, in the order in which `make faults` runs them."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from tests.campaigns.figures import Campaign

MODULES: Final = (
    "tests.model.campaign",
    "tests.simulation.campaign",
    "tests.campaigns.races",
    "tests.campaigns.storm",
    "tests.crashes.points",
    "tests.crashes.store_points",
    "tests.crashes.transactional",
    "tests.crashes.step_points",
    "tests.crashes.subscribing_points",
    "tests.crashes.serving_points",
    "tests.crashes.random_kills",
    "tests.crashes.retry_kills",
    "tests.fuzz.campaign",
    "tests.fuzz.native",
    "tests.security_fuzz.campaign",
    "tests.kafka_faults.zombies",
    "tests.kafka_faults.store_zombies",
    "tests.crashes.transactional_zombies",
    "tests.stalled_starts.campaign",
    "tests.kafka_faults.rebalances",
    "tests.kafka_faults.brokers",
    "tests.redis_faults.campaign",
    "tests.crashes.soak",
)


def campaigns() -> dict[str, Campaign]:
    """Return all campaigns by name.

    Raises:
        TypeError: A listed module does not define a campaign.
    """
    found = {}
    for name in MODULES:
        campaign = import_module(name).CAMPAIGN
        if not isinstance(campaign, Campaign):
            raise TypeError(f"{name}.CAMPAIGN is not a Campaign")
        found[campaign.name] = campaign
    return found
