"""A run: processes, broker and store from a seed, and its verdict."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from integr8s_idem.events import encode_event, event_headers
from integr8s_idem.keys import Key, KeySpace
from integr8s_idem.worker.kafka_protocols import Partition
from tests.simulation.broker import SESSION, Broker, Message
from tests.simulation.failing import attempts_before, share_of
from tests.simulation.faults import wreak_havoc
from tests.simulation.history import GivenUp, History
from tests.simulation.network import Network, Weather
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
    versions_of,
)

PLACES: Final = "ABCD"
"""Processes are named by place and restart: B3 is the third process in place B."""

PATIENCE: Final = 120.0
"""Seconds without faults in which everything must be settled."""

LAST_WORDS: Final = 30.0
"""Seconds in which a stopped process must end all its tasks."""


def markers_of(seed: int) -> Callable[[], int]:
    """Return a function for the number of markers after a message; half of all runs have some.

    It has a random generator of its own, so that the other choices of a seed do not depend on it.
    """
    random = Random(f"{seed}/markers")  # a simulation
    often = random.choice((0.0, 0.0, 0.3, 0.8))
    return lambda: random.randint(1, 3) if random.random() < often else 0


class World:
    """The state of a run."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(seed)  # a simulation
        self.history = History()
        self.setup: Setup = draw_setup(random)
        self.habits = Habits.of(random)
        self.habits.ruled = share_of(seed)
        self._version = versions_of(seed)
        self.handlers = Handlers(seed, self.habits, self.history, self._kill)
        self.store_network = Network(random)
        self.server = Server(self.history)
        self.broker = Broker(self.history, random, Network(random), TOPICS, random.randint(1, 2))
        self.broker.group.check = self._check_commit
        self.broker.transactions = markers_of(seed)
        self.workers: list[Worker] = []
        self.processes: list[Process] = []
        self._space = KeySpace(self.setup.config.key_prefix, SCOPE)
        self._calm = False
        self._ahead = [random.uniform(-2 * LEASE, 2 * LEASE) for _ in PLACES]
        self._keys: dict[tuple[str, int, int], tuple[str, ...]] = {}

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

    # Finished messages

    def _keys_of(self, message: Message) -> tuple[str, ...]:
        where = (message.topic, message.partition, message.offset)
        keys = self._keys.get(where)
        if keys is None:
            event_id = dict(message.headers)["event_id"].decode()
            keys = self._keys[where] = tuple(
                self._space.full(Key.of_event(name, message.topic, "id", event_id)) for name in HANDLERS[message.topic]
            )
        return keys

    def _unfinished(self, message: Message) -> list[str]:
        """Return the keys of a message that are neither completed nor dead-lettered."""
        if message.is_marker:
            return []
        truth = self.history.truth
        dead_letters = truth.dead_letters.get((message.topic, message.partition, message.offset), [])
        given_up = {dead_letter.handler for dead_letter in dead_letters}
        return [
            key
            for name, key in zip(HANDLERS[message.topic], self._keys_of(message), strict=True)
            if key not in truth.completed and name not in given_up
        ]

    def _check_commit(self, partition: Partition, known: int, offset: int) -> None:
        for message in self.broker.logs[partition][known:offset]:
            if unfinished := self._unfinished(message):
                self.history.violate(
                    "C", f"offset {offset} of {partition} passes {message.offset}, unfinished: {unfinished}"
                )

    # Run

    async def run(self) -> None:
        random = self.random
        for place in range(random.randint(2, 3)):
            self.start(place)
        seconds = random.uniform(4, 15)
        chaos = asyncio.create_task(wreak_havoc(self, random, seconds))
        producer = asyncio.create_task(self._publish(random, seconds))
        await asyncio.wait({chaos, producer})
        for task in (chaos, producer):
            task.result()
        self._be_calm()
        await self._until(self._settled, PATIENCE, "settling everything")
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
        for log in self.broker.logs.values():
            for message in log:
                if unfinished := self._unfinished(message):
                    history.counts["lost"] += 1
                    history.violate("L", f"{message.topic} {message.offset} is lost: {unfinished}")
        for key in truth.completed - truth.discarded:
            if key not in truth.sink:
                history.violate("L", f"{key} is completed without an effect")
        self._judge_crashes()
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
        for log in self.broker.logs.values():
            for message in log:
                dead_letters = self.history.truth.dead_letters[message.topic, message.partition, message.offset]
                crashed = any(dead_letter.error == "CrashedTooOftenError" for dead_letter in dead_letters)
                if crashed and dict(message.headers)["event_id"].decode() != self.habits.deadly:
                    what = f"{message.topic} {message.offset}"
                    self.history.violate("K", f"{what} is given up because of crashes of another event")

    def _judge_rules(self) -> None:
        """Check P and V: every failure has the consequence that its rule says; no payload is taken for another one."""
        history, deliveries = self.history, Counter[str]()
        for log in self.broker.logs.values():
            for message in log:
                if message.is_marker:
                    continue
                keys = dict(zip(HANDLERS[message.topic], self._keys_of(message), strict=True))
                deliveries.update(keys.values())
                for dead_letter in history.truth.dead_letters[message.topic, message.partition, message.offset]:
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
            messages = [message for message in log if not message.is_marker]
            exempt = {
                key
                for message in messages
                for key in self._keys_of(message)
                if (message.topic, message.partition, message.offset) in dropped or self.history.truth.losses[key]
            }
            for message in messages:
                for name, key in zip(HANDLERS[message.topic], self._keys_of(message), strict=True):
                    if key not in exempt:
                        lanes.setdefault((partition, message.key if by_key else None, name), []).append(key)
        return list(lanes.values())


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
