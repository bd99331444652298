"""Retry topics of a run: which handlers are overtaken, how long their events wait, and what fails meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

from integr8s_idem.config.sections import ReplaySettings
from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.worker.replay_signatures import event_hash
from integr8s_idem.worker.retry_copies import Origin, RetryCopy
from integr8s_idem.worker.retry_topics import RetryTopics
from tests.simulation.failing import Kind, RuledFailures
from tests.simulation.processes import Process
from tests.simulation.workload import HANDLERS, LEASE, SCOPE, TOPICS, WHEN, Placed

if TYPE_CHECKING:
    from tests.simulation.world import World

EVERY: Final = 4
"""One of so many seeds has retry topics; the others are as they were before there were any."""

STRANGERS: Final = 1_000_000
"""Numbers of events that no handler may see start here: their copies are for others, or nobody has signed them."""

LONG_DELAY: Final = 60.0
"""Seconds: longer than an unsettled record is kept if the ttl is short."""

_ALWAYS: Final = 10**6


@dataclass(frozen=True, slots=True)
class Overtaking:
    """The retry topics of a run."""

    seed: int
    handlers: frozenset[str]
    """The handlers that are overtaken."""
    tiers: tuple[str, ...]
    ttl: int | None
    """Seconds, fewer than those of the longest delays; `None` for the default."""
    replay: ReplaySettings
    missing: frozenset[str]
    """The retry topics that do not exist at first."""
    quiet: bool
    """Whether nothing but the handlers fails."""

    @property
    def topics(self) -> RetryTopics:
        return RetryTopics(SCOPE, self.tiers, TOPICS)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(topic.name for topic in self.topics.all())

    def failures_of(self, handler: str, event_id: str) -> RuledFailures | None:
        """Return the failures of a work that is overtaken; `None` if it fails like others, or not."""
        random = Random(f"{self.seed}/{handler}/{event_id}/overtaking")  # a simulation
        if handler not in self.handlers or random.random() < 0.4:
            return None
        if random.random() < 0.1:
            return RuledFailures(Kind.RETRY_AFTER, 1, delay=LONG_DELAY)
        attempts = random.choice((1, 1, 2, 3, _ALWAYS))
        kind = random.choice((Kind.RETRY_LATER, Kind.RETRY_AFTER, Kind.RETRY_AFTER))
        # Below, between and above the delays of all topics.
        delay = random.choice((0.3, 1.0, 2.5, 5.0, 12.0))
        return RuledFailures(kind, attempts, random.random() < 0.3, delay)


def overtaking_of(seed: int) -> Overtaking | None:
    """Return the retry topics of a run; `None` if it has none.

    They have a random generator of their own, so that the other choices of a seed do not depend on them.
    """
    if seed % EVERY != EVERY - 1:
        return None
    random = Random(f"{seed}/overtaking")  # a simulation
    names = sorted({name for handlers in HANDLERS.values() for name in handlers})
    tiers = random.choice((("1s", "4s"), ("2s", "6s"), ("1s", "3s", "8s")))
    secret = {"secret": "s" * 32} if random.random() < 0.7 else {}
    plan = Overtaking(
        seed,
        frozenset(random.sample(names, random.randint(1, len(names)))),
        tiers,
        random.choice((None, None, int(LEASE) + 1)),
        ReplaySettings.model_validate(secret),
        frozenset(),
        random.random() < 0.2,
    )
    if plan.quiet or random.random() < 0.7:
        return plan
    missing = frozenset(random.sample(plan.names, random.randint(1, 2)))
    return Overtaking(seed, plan.handlers, tiers, plan.ttl, plan.replay, missing, quiet=False)


async def disturb_copies(world: World, overtaking: Overtaking, seconds: float) -> None:
    """Inject the faults that only runs with retry topics have, at some times within `seconds`."""
    random = Random(f"{overtaking.seed}/disturbed copies")  # a simulation
    loop = asyncio.get_running_loop()
    began = loop.time()
    created = random.uniform(0, seconds)
    faults = (lose_scheduled, crash_after_a_schedule, crash_after_a_copy, rebalance, foreign_copy, forged_copy)
    moments = sorted(random.uniform(0.5, seconds) for _ in range(random.randint(1, 6)))
    for moment in moments:
        await asyncio.sleep(began + moment - loop.time())
        if loop.time() - began >= created:
            world.create_retry_topics()
        fault = random.choice(faults)
        world.history.note("fault", fault.__name__)
        fault(world, overtaking, random)


def lose_scheduled(world: World, _: Overtaking, random: Random) -> None:
    """The store loses a record while copies of its event wait."""
    if waiting := world.server.scheduled_keys():
        world.server.lose([random.choice(waiting)])


def crash_after_a_schedule(world: World, _: Overtaking, random: Random) -> None:
    """A process dies between the schedule of an event and the confirmation of its copy."""
    worker, steps = world.some_worker(random), random.randint(1, 12)
    if worker is not None and worker.client is not None:
        worker.client.when_scheduled = lambda: world.after_steps(worker, steps, world.crash)


def crash_after_a_copy(world: World, _: Overtaking, random: Random) -> None:
    """A process dies between its next copy and the commit of the offset."""
    steps = random.randint(1, 12)

    def strike(process: Process) -> None:
        world.broker.when_copied = None
        for worker in world.workers:
            if worker.process is process:
                world.after_steps(worker, steps, world.crash)

    world.broker.when_copied = strike


def rebalance(world: World, _: Overtaking, random: Random) -> None:
    """The group rebalances, while copies wait or not."""
    if random.random() < 0.3:
        world.broker.group.rewind = random.randint(1, 5)
    world.broker.group.begin_rebalance()


def foreign_copy(world: World, overtaking: Overtaking, random: Random) -> None:
    """A copy for another consumer group arrives in a retry topic."""
    _append_stranger(world, overtaking, random, "another group", overtaking.replay.keys)


def forged_copy(world: World, overtaking: Overtaking, random: Random) -> None:
    """A copy that no worker has signed arrives in a retry topic, if copies are signed."""
    if overtaking.replay.keys:
        _append_stranger(world, overtaking, random, SCOPE, random.choice(((), (b"x" * 32,))))


def _append_stranger(
    world: World, overtaking: Overtaking, random: Random, group: str, secrets: tuple[bytes, ...]
) -> None:
    existing = [name for name in overtaking.names if name.startswith("placed.") and name in world.broker.topics]
    if not existing:
        return
    number, topic = STRANGERS + random.randrange(STRANGERS), random.choice(existing)
    event = Placed(event_id=f"s{number}", number=number, timestamp=WHEN)
    value, headers = encode_event(event), event_headers(event)
    origin = Origin("placed", 0, 0, 0, None, value, headers)
    copy = RetryCopy(group, HANDLERS["placed"][0], event_hash(event.event_id), 0, 1, 0, origin)
    world.history.counts["strangers"] += 1
    world.broker.append(topic, None, value, copy.headers(topic, secrets))
