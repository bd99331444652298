"""A run: processes, broker and store from a seed, and its verdict."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.worker.kafka_protocols import Partition
from tests.simulation.broker import SESSION, Broker, Message
from tests.simulation.copies import Copies, Place, copy_in, place_of
from tests.simulation.failing import attempts_before, share_of
from tests.simulation.faults import wreak_havoc
from tests.simulation.history import GivenUp, History, Run
from tests.simulation.network import Network, Weather
from tests.simulation.overtaking import disturb_copies, overtaking_of
from tests.simulation.processes import PROCESS, Process, SimulatedLoop, bury
from tests.simulation.sources import driven_by
from tests.simulation.store import Server
from tests.simulation.worker import Worker
from tests.simulation.workload import (
    HANDLERS,
    LEASE,
    SCOPE,
    TOPICS,
    WHEN,
    Habits,
    Handlers,
    Placed,
    PlacedNow,
    Setup,
    draw_setup,
    plan_of,
    versions_of,
)

PLACES: Final = "ABCD"
"""Processes are named by place and restart: B3 is the third process in place B."""

PATIENCE: Final = 120.0
"""Seconds without faults in which everything must be settled."""

PATIENCE_WITH_RETRY_TOPICS: Final = 300.0
"""The same, if some events wait in retry topics for a minute or more."""

LAST_WORDS: Final = 30.0
"""Seconds in which a stopped process must end all its tasks."""


def markers_of(seed: int) -> Callable[[], int]:
    """Return a function for the number of markers after a message; half of all runs have some.

    It has a random generator of its own, so that the other choices of a seed do not depend on it.
    """
    random = Random(f"{seed}/markers")  # a simulation
    often = random.choice((0.0, 0.0, 0.3, 0.8))
    return lambda: random.randint(1, 3) if random.random() < often else 0


def reconciling_of(seed: int) -> float | None:
    """Return how often reconcile functions do not know the outcome; `None` if there are none, as in half of all runs.

    It has a random generator of its own, like `markers_of`.
    """
    random = Random(f"{seed}/reconcile")  # a simulation
    return random.choice((0.0, 0.0, 0.3)) if random.random() < 0.5 else None


class World:
    """The state of a run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(seed)  # a simulation
        self.history = History()
        overtaking = overtaking_of(seed)
        self.setup: Setup = draw_setup(random, overtaking)
        self.habits = Habits.of(random)
        self.habits.ruled = share_of(seed)
        self.habits.overtaking = overtaking
        self._version = versions_of(seed)
        self.handlers = Handlers(seed, self.habits, self.history, self._kill, self._begun)
        if (unknown := reconciling_of(seed)) is not None:
            self.habits.unknown = unknown
            self.history.reconciles = frozenset(HANDLERS["placed"])
        self.store_network = Network(random)
        self.server = Server(self.history)
        self.copies: Copies | None = None
        self.broker = Broker(self.history, random, Network(random), TOPICS, random.randint(1, 2))
        self.broker.group.check = self._check_commit
        self.broker.transactions = markers_of(seed)
        self.workers: list[Worker] = []
        self.processes: list[Process] = []
        self._space = KeySpace(self.setup.config.key_prefix, SCOPE)
        self._calm = False
        self._ahead = [random.uniform(-2 * LEASE, 2 * LEASE) for _ in PLACES]
        self._keys: dict[Place, tuple[str, ...]] = {}
        if overtaking is not None:
            self.history.overtaken = overtaking.handlers
            self.server.expires = overtaking.ttl is not None
            self.copies = Copies(self, overtaking)
            self.broker.on_copy = self.copies.add
            for name in overtaking.names:
                if name not in overtaking.missing:
                    self.broker.create(name)

    # Processes

    def start(self, place: int, life: int = 1) -> None:
        """Start a process; another one replaces it when it has ended."""
        if self._calm:
            return
        worker = Worker(self, f"{PLACES[place]}{life}", self._ahead[place], self._version())
        self.workers = [other for other in self.workers if not other.process.dead] + [worker]
        self.processes.append(worker.process)
        worker.when_it_ends(lambda: self._ended(worker, place, life))

    def _ended(self, worker: Worker, place: int, life: int) -> None:
        if worker.at_once:
            # The client dies with its process; the group notices when the session expires.
            worker.process.kill()
            self._silent_from_now(worker, lambda: True)
        if not self._calm:
            self._start_again(place, life)

    def _start_again(self, place: int, life: int) -> None:
        self.store_network.later(self.random.uniform(0, 2), lambda: self.start(place, life + 1))

    def some_worker(self, random: Random) -> Worker | None:
        living = [worker for worker in self.workers if worker.process.running and not worker.ended]
        return random.choice(living) if living else None

    def after_some_steps(self, random: Random, strike: Callable[[Worker], None]) -> None:
        """Inject a fault into a process between two of its next steps."""
        worker = self.some_worker(random)
        if worker is not None:
            self.after_steps(worker, random.randint(1, 40), strike)

    def after_steps(self, worker: Worker, steps: int, strike: Callable[[Worker], None]) -> None:
        """Inject a fault into a process after `steps` steps."""
        worker.process.after_steps(steps, lambda: self.store_network.now(lambda: self._strike(worker, strike)))

    def _strike(self, worker: Worker, strike: Callable[[Worker], None]) -> None:
        if not self._calm and worker.process.running and not worker.ended:
            strike(worker)

    def crash(self, worker: Worker) -> None:
        worker.process.kill()
        self.history.counts["crashes"] += 1
        self.history.note("crash", worker.process.name)
        self._silent_from_now(worker, lambda: True)
        self._start_again(PLACES.index(worker.process.name[0]), int(worker.process.name[1:]))

    def _kill(self, process: Process) -> None:
        """A deadly event kills the process that handles it."""
        for worker in self.workers:
            if worker.process is process and process.running and not worker.ended:
                self.history.counts["deadly"] += 1
                self.crash(worker)

    def stall(self, worker: Worker, seconds: float) -> None:
        process = worker.process
        process.stall()
        self.history.counts["stalls"] += 1
        self.history.note("stall", process.name, seconds)
        stalls = process.stalls
        self._silent_from_now(worker, lambda: not process.running and process.stalls == stalls)
        self.store_network.later(seconds, lambda: self._resume(process))

    async def cut_off(self, worker: Worker, seconds: float) -> None:
        self.history.counts["partitions"] += 1
        self.history.note("cut off", worker.process.name, seconds)
        worker.process.cut_off = True
        self._silent_from_now(worker, lambda: worker.process.cut_off)
        await asyncio.sleep(seconds)
        worker.process.cut_off = False

    def _resume(self, process: Process) -> None:
        if not process.dead and not process.running:
            self.history.note("resume", process.name)
            self.history.last_resumed[process.name] = asyncio.get_running_loop().time()
            process.resume()

    def _silent_from_now(self, worker: Worker, still: Callable[[], bool]) -> None:
        consumer = worker.consumer
        if consumer is not None:
            self.store_network.later(SESSION, lambda: self.broker.group.leave(consumer) if still() else None)

    # Retry topics

    def create_retry_topics(self) -> None:
        """Create those that did not exist at first; workers read them after a restart."""
        overtaking = self.habits.overtaking
        for name in overtaking.names if overtaking is not None else ():
            if name not in self.broker.topics:
                self.history.note("topic created", name)
                self.broker.create(name)

    def moves(self) -> int:
        """Return a number that changes when partitions may move."""
        return self.history.counts["rebalances"] + self.history.counts["assignments"]

    def note_schedule(self, process: Process, key: str) -> None:
        if self.copies is not None:
            self.copies.note_schedule(process, key)

    def _begun(self, run: Run, number: int) -> None:
        if self.copies is not None:
            self.copies.check_run(run, number)

    def is_unread(self, key: str) -> bool:
        """Return whether the offset of a message with this key is not committed, in the topic of its event."""
        return any(
            key in self._keys_of(message)
            for at, message in self._events()
            if message.offset >= self.broker.group.committed.get(at, 0)
        )

    # Finished messages

    def _events(self) -> Iterator[tuple[Partition, Message]]:
        """Yield the messages in the topics of events, without markers."""
        for at, log in self.broker.logs.items():
            if at.topic in HANDLERS:
                yield from ((at, message) for message in log if not message.is_marker)

    def key_of(self, handler: str, topic: str, event_id: str) -> str:
        return self._space.full(Key.of_event(handler, topic, "id", event_id))

    def _keys_of(self, message: Message) -> tuple[str, ...]:
        where = place_of(message)
        keys = self._keys.get(where)
        if keys is None:
            event_id = dict(message.headers)["event_id"].decode()
            keys = self._keys[where] = tuple(
                self.key_of(name, message.topic, event_id) for name in HANDLERS[message.topic]
            )
        return keys

    def _works_of(self, message: Message) -> list[tuple[str, str, Place]]:
        """Return the handlers of a message with their keys, and the place of the message in the topic of its event."""
        if message.is_marker:
            return []
        if message.topic in HANDLERS:
            keys = zip(HANDLERS[message.topic], self._keys_of(message), strict=True)
            return [(name, key, place_of(message)) for name, key in keys]
        copy = copy_in(message)
        if copy.is_own:
            return [(copy.handler, self.key_of(copy.handler, copy.origin.topic, copy.event_id), copy.origin)]
        return [("", "forged copy", copy.place)] if copy.is_forged else []

    def _unfinished(self, message: Message) -> list[str]:
        """Return the keys of a message that are neither completed nor dead-lettered."""
        truth = self.history.truth
        return [
            key
            for name, key, origin in self._works_of(message)
            if key not in truth.completed
            and all(dead_letter.handler != name for dead_letter in truth.dead_letters.get(origin, ()))
        ]

    def _waits_elsewhere(self, key: str, message: Message) -> bool:
        """Return whether a copy waits in a retry topic in place of the message."""
        if self.copies is None:
            return False
        return any(each == key and self.copies.waits(key, origin) for _, each, origin in self._works_of(message))

    def _check_commit(self, partition: Partition, known: int, offset: int) -> None:
        for message in self.broker.logs[partition][known:offset]:
            if unfinished := [key for key in self._unfinished(message) if not self._waits_elsewhere(key, message)]:
                self.history.violate(
                    "C", f"offset {offset} of {partition} passes {message.offset}, unfinished: {unfinished}"
                )

    # Run

    async def run(self) -> None:
        random = self.random
        for place in range(random.randint(2, 3)):
            self.start(place)
        seconds = random.uniform(4, 15)
        overtaking = self.habits.overtaking
        work = [self._publish(random, seconds)]
        if overtaking is None or not overtaking.quiet:
            work.insert(0, wreak_havoc(self, random, seconds))
        if overtaking is not None and not overtaking.quiet:
            work.append(disturb_copies(self, overtaking, seconds))
        tasks = [asyncio.create_task(each) for each in work]
        await asyncio.wait(tasks)
        for task in tasks:
            task.result()
        self._be_calm()
        await self._until(self._settled, PATIENCE_WITH_RETRY_TOPICS if self.copies else PATIENCE, "settling everything")
        self._calm = True
        for worker in self.workers:
            worker.stop()
        await self._until(self._all_over, LAST_WORDS, "end of all processes")
        self._judge()

    async def _publish(self, random: Random, seconds: float) -> None:
        """Publish events, some of them twice."""
        sent: list[Placed | PlacedNow] = []
        for number in range(random.randint(4, 12)):
            if random.random() < 0.7:
                await asyncio.sleep(random.uniform(0, 2 * seconds / 10))
            placed = Placed(
                event_id=f"e{number}",
                number=number,
                items=["a"],
                timestamp=WHEN,
                aggregate_id=random.choice(("x", "y", "z")),
            )
            event = PlacedNow(**placed.model_dump(), note="wrap it") if self._version() else placed
            sent.append(event)
            self._send(event)
            while random.random() < 0.25:
                self._send(random.choice(sent))
        self.history.counts["events"] += len(sent)

    def _send(self, event: Placed | PlacedNow) -> None:
        key = event.aggregate_id.encode() if event.aggregate_id is not None else None
        self.broker.append(event.event_type, key, encode_event(event), event_headers(event))

    def _be_calm(self) -> None:
        self.history.note("calm")
        self.habits.calm = True
        self.server.down = self.broker.refusing = False
        self.store_network.weather = Weather()
        self.broker.network.weather = Weather()
        self.broker.poll_failures = self.broker.commit_failures = self.broker.hold_ups = 0.0
        for process in self.processes:
            process.on_step = None
            self._resume(process)
        self.broker.when_copied = None
        if self.copies is not None:
            self.copies.quiet = True
            self.create_retry_topics()
            for worker in self.workers:
                if worker.client is not None:
                    worker.client.when_scheduled = None
                if worker.lacks_topics() and not worker.ended:
                    worker.stop()

    def _settled(self) -> bool:
        committed = self.broker.group.committed
        return all(committed.get(at, 0) == len(log) for at, log in self.broker.logs.items())

    def _all_over(self) -> bool:
        return all(
            worker.process.dead or (worker.ended and all(task.done() for task in worker.process.tasks))
            for worker in self.workers
        )

    async def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + seconds
        while not condition() and not self.history.broken.done():
            if loop.time() > give_up_at:
                self.history.violate("S", f"{what} took more than {seconds:g} s; {self._open_work()}")
                return
            await asyncio.wait({self.history.broken}, timeout=0.25)

    def _open_work(self) -> str:
        group = self.broker.group
        behind = {
            f"{at.topic}-{at.partition}": f"{group.committed.get(at, 0)} of {len(log)}"
            for at, log in self.broker.logs.items()
            if group.committed.get(at, 0) != len(log)
        }
        tasks = [
            f"{worker.process.name}: {task!r}"
            for worker in self.workers
            if worker.ended
            for task in worker.process.tasks
            if not task.done()
        ]
        return f"offsets {behind}, tasks {tasks}"

    def _judge(self) -> None:
        history, truth = self.history, self.history.truth
        if self.copies is not None:
            self.copies.judge()
        for log in self.broker.logs.values():
            for message in log:
                if unfinished := self._unfinished(message):
                    history.counts["lost"] += 1
                    history.violate("L", f"{message.topic} {message.offset} is lost: {unfinished}")
        for key in truth.completed - truth.discarded:
            if key not in truth.sink:
                history.violate("L", f"{key} is completed without an effect")
        self._judge_crashes()
        self._judge_outgoing()
        self._judge_rules()
        history.judge_repeats()
        if self.setup.service.ordering != "none":
            history.judge_order(self._lanes())

    def _judge_crashes(self) -> None:
        """Check K: no event is given up because of crashes that another event causes."""
        counts = self.history.counts
        # Any of these faults may have hit a harmless event that ran alone.
        others = sum(counts[what] for what in ("crashes", "stalls", "partitions", "stops")) - counts["deadly"]
        if others + self.history.truth.jumps >= self.setup.config.max_attempts:
            return
        for _, message in self._events():
            dead_letters = self.history.truth.dead_letters[place_of(message)]
            crashed = any(dead_letter.error == "CrashedTooOftenError" for dead_letter in dead_letters)
            if crashed and dict(message.headers)["event_id"].decode() != self.habits.deadly:
                what = f"{message.topic} {message.offset}"
                self.history.violate("K", f"{what} is given up because of crashes of another event")

    def _judge_outgoing(self) -> None:
        """Check N: work that is completed has published its event, also if a reconcile function found its effect."""
        if not self.history.reconciles:
            return  # a handler that changes its event may have another plan at its next attempt
        logs = self.broker.logs.items()
        done = self.history.truth.completed - self.history.truth.discarded
        shipped = {_number_of(message) for at, log in logs for message in log if at.topic == "shipped"}
        placed = [message for at, log in logs for message in log if at.topic == "placed" and not message.is_marker]
        for message in placed:
            event_id = dict(message.headers)["event_id"].decode()
            [key] = [key for key in self._keys_of(message) if ":pack:" in key]
            ships = plan_of(self.seed, "pack", event_id, self.habits).ships
            if ships and key in done and _number_of(message) not in shipped:
                self.history.violate("N", f"{key} is completed, but its event is not published")

    def _judge_rules(self) -> None:
        """Check P and V: every failure has the consequence that its rule says; no payload is taken for another one."""
        history, deliveries = self.history, Counter[str]()
        for _, message in self._events():
            keys = dict(zip(HANDLERS[message.topic], self._keys_of(message), strict=True))
            deliveries.update(keys.values())
            for dead_letter in history.truth.dead_letters[place_of(message)]:
                self._judge_dead_letter(dead_letter, keys.get(dead_letter.handler, ""))
        for key, seconds in history.truth.early:
            # Another delivery of the event does not know the delay of the first one.
            if deliveries[key] == 1:
                history.violate("P", f"{key} was retried {seconds:.3f} s before its delay had passed")
        history.counts["discarded_keys"] += len(history.truth.discarded)

    def _judge_dead_letter(self, dead_letter: GivenUp, key: str) -> None:
        if dead_letter.reason == "key_reused":
            self.history.violate("V", f"{key} is dead-lettered as reused, though its payload was always the same")
        if dead_letter.reason != "handler_failed":
            return
        runs = self.history.truth.runs[key]
        made = max([len(runs), *(run.attempt for run in runs)])
        required = attempts_before(dead_letter.error, self.setup.config.max_attempts)
        if required is None or made < required:
            text = f"{key} is given up after {made} attempts because of {dead_letter.error}; required: {required}"
            self.history.violate("P", text)

    def _lanes(self) -> list[list[str]]:
        """Return the keys by lane in log order, without keys that were given up or lost, which have no order."""
        lanes: dict[Any, list[str]] = {}
        by_key = self.setup.service.ordering == "key"
        dropped = set(self.history.truth.dead_letters)
        for partition, log in self.broker.logs.items():
            if partition.topic not in HANDLERS:
                continue
            messages = [message for message in log if not message.is_marker]
            exempt = {
                key
                for message in messages
                for key in self._keys_of(message)
                if (message.topic, message.partition, message.offset) in dropped or self.history.truth.losses[key]
            }
            for message in messages:
                for name, key in zip(HANDLERS[message.topic], self._keys_of(message), strict=True):
                    if key not in exempt and name not in self.history.overtaken:
                        lanes.setdefault((partition, message.key if by_key else None, name), []).append(key)
        return list(lanes.values())


def _number_of(message: Message) -> int:
    """Return the number of an order, or -1 for a marker of a transaction."""
    return -1 if message.is_marker else int(json.loads(message.value or b"{}").get("number", -1))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a seed."""

    seed: int
    violations: list[str]
    counts: Counter[str]
    digest: str
    trace: list[tuple[Any, ...]]


def simulate(seed: int, *, digest: bool = False) -> Verdict:
    """Simulate a run; the result depends only on the seed."""
    loop = SimulatedLoop()
    collecting = gc.isenabled()
    gc.disable()  # so that warnings of collected objects occur at the same step in every run
    world: World | None = None

    async def main() -> None:
        nonlocal world
        world = World(seed)
        loop.set_exception_handler(_Unhandled(world.history))
        await world.run()

    with driven_by(Random(~seed)):  # a simulation
        try:
            loop.run_until_complete(main())
        finally:
            loop.set_exception_handler(lambda *_: None)
            if world is not None:
                world.history.closed = True
                bury(loop, world.processes)
            loop.close()
            if collecting:
                gc.enable()
    assert world is not None
    history = world.history
    return Verdict(seed, history.violations, history.counts, history.digest() if digest else "", history.trace)


class _Unhandled:
    """Reports unhandled exceptions as violations, except those of dead processes."""

    def __init__(self, history: History) -> None:
        self._history = history

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        process = PROCESS.get()
        if process is None or not process.dead:
            self._history.violate("U", f"{context.get('message')}: {context.get('exception')!r}")
