"""The model as a campaign: trial n explores every state of configuration n.

It does not count effects in a fenced sink. A sink rejects by key and fence, and in the model each work has one key, so
that no protocol could get a second effect into it. Instead a rule states what a sink relies on: it never rejects the
owner.
"""

from __future__ import annotations

from tests.campaigns.figures import Campaign, Figures, ViolationError
from tests.model.configurations import CONFIGURATIONS
from tests.model.explorer import explore
from tests.model.protocol import LIBRARY
from tests.model.state import Rule
from tests.model.surroundings import Machine
from tests.model.telling import table


def run(first: int, count: int) -> Figures:
    """Explore these configurations; numbers beyond the last one count nothing.

    Raises:
        ViolationError: A rule can be broken; the message has the shortest path.
    """
    figures = Figures()
    for number, setup in enumerate(CONFIGURATIONS[first : first + count], first):
        seen = explore(Machine(setup, LIBRARY))
        found = seen.counterexample
        lost = int(found is not None and found.rule is Rule.LOST)
        figures.update(configurations=1, states=seen.states, steps=seen.steps, lost=lost)
        if found is not None:
            raise ViolationError(f"configuration {number} ({setup}):\n{table(found, setup)}")
    return figures


CAMPAIGN = Campaign(
    name="model",
    counts="states",
    says="one state of the reservation protocol, all of whose next steps keep every rule",
    scenarios=(),
    in_test=2,
    target=12_000_000,
    batch=1,
    run=run,
    at_least=200_000,
)
