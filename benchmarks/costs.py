"""What does an event cost, stage by stage, in the worker, in Redis and in Kafka?

Stages are measured alone, on real parts (`stages.py`), and summed up beside the whole service of the same round: what
is left over is told as well.  Variants are whole services: what they cost more is what is asked about.
"""

from __future__ import annotations

import asyncio
import gc
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from statistics import median
from typing import Any, Final, TypeAlias

import psutil
from redis.asyncio import Redis

from benchmarks.contestants import must
from benchmarks.kafka import LONGEST_TURN, NOOP, Handler, OrderPlaced, Topic, filled_topic, new_scope, router_of
from benchmarks.measuring import Flat, turned
from benchmarks.observers import Telemetry
from benchmarks.rounds import Measured, Options, Tell, spread_of
from benchmarks.stages import Costs, FreeStore, Log, Record, Stages, collector, fetched, scoped, without_collector
from integr8s_idem import EventRouter, IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.handlers.router import Invoke, call_with_event
from integr8s_idem.telemetry import SILENT, Observer
from tests.support.kafka.broker import KafkaBroker

EVENTS: Final = 5_000
RESULT: Final = "x" * 198
"""With its quotation marks, as it is kept, 200 bytes."""
OWN_THRESHOLDS: Final = (700, 10, 10)
"""Of the garbage collector, as Python 3.11 and 3.12 start with."""
SAMPLE: Final = 200
"""Keys whose memory is asked for."""
STAGES: Final = ("fetch", "decode", "key", "reserve", "dispatch", "handler", "settle", "commit", "gc")
"""Of an event that is new, on its way through a service with the plain wiring."""

Turn: TypeAlias = Callable[[], Awaitable[Costs]]


class Books:
    """What Redis and the broker have spent."""

    def __init__(self, client: Redis, broker: int) -> None:
        self._client = client
        self._broker = psutil.Process(broker)

    async def read(self) -> Costs:
        """So far: microseconds, and bytes."""
        told: dict[str, Any] = await self._client.info("everything")
        scripts = told.get("cmdstat_evalsha", {})
        broker = self._broker.cpu_times()
        return {
            "redis_us": (told["used_cpu_user"] + told["used_cpu_sys"]) * 1e6,
            "redis_script_us": scripts.get("usec", 0),
            "redis_in_bytes": told["total_net_input_bytes"],
            "redis_out_bytes": told["total_net_output_bytes"],
            "broker_us": (broker.user + broker.system) * 1e6,
        }

    async def memory(self) -> float:
        """Bytes that records take, with the tables that hold them."""
        told: dict[str, Any] = await self._client.info("memory")
        return float(told["used_memory"] - told["mem_clients_normal"] - told["mem_aof_buffer"])


class Whole:
    """Whole services on a real Kafka and a real Redis."""

    def __init__(self, topic: Topic, books: Books, telemetry: Telemetry) -> None:
        self._topic = topic
        self._books = books
        self._telemetry = telemetry
        self._done = new_scope()
        """All events are completed in it."""

    async def prepare(self) -> None:
        await self.fresh("", self._done)

    async def fresh(
        self, prefix: str, scope: str = "", *, router: Callable[[Handler], EventRouter] = router_of
    ) -> Costs:
        """All events are new."""
        handler = Handler(self._topic.events)
        return await self._booked(prefix, self._served(handler, router(handler), scope or new_scope()))

    async def own_thresholds(self) -> Costs:
        """As `fresh`, with the garbage collector looking as often as Python lets it; what was frozen stays so."""
        before = gc.get_threshold()
        gc.set_threshold(*OWN_THRESHOLDS)
        try:
            return await self.fresh("own_thresholds_")
        finally:
            gc.set_threshold(*before)

    async def with_telemetry(self) -> Costs:
        """With metrics of every event and spans of a part of them."""
        self._telemetry.turns += 1
        handler = Handler(self._topic.events)
        served = self._served(handler, router_of(handler), new_scope(), observer=self._telemetry.observer)
        return _priced("telemetry_", await served, self._topic.events)

    async def with_scope(self) -> Costs:
        """Each event in a REQUEST scope of Dishka's, with something in it."""
        handler = Handler(self._topic.events)
        async with scoped(handler) as (router, invoke):
            served = await self._served(handler, router, new_scope(), invoke=invoke)
        return _priced("scoped_", served, self._topic.events)

    async def duplicates(self) -> Costs:
        """All events were handled before."""
        return await self._booked("duplicate_", self._refused())

    async def _booked(self, prefix: str, turn: Awaitable[Measured]) -> Costs:
        before = await self._books.read()
        with collector() as collected:
            found = await turn
        after, events = await self._books.read(), self._topic.events
        told = {f"{prefix}{name}": (after[name] - before[name]) / events for name in before}
        told |= {f"{prefix}{name}": cost for name, cost in collected.us(events).items()}
        return {**told, **_priced(prefix, found, events)}

    async def _served(
        self,
        handler: Handler,
        router: EventRouter,
        scope: str,
        *,
        observer: Observer = SILENT,
        invoke: Invoke = call_with_event,
    ) -> Measured:
        async with _manager(self._topic, scope, observer) as manager:
            dispatcher = IdempotentEventDispatcher(router, manager, invoke=invoke)
            return await self._topic.served(dispatcher, NOOP, handler)

    async def _refused(self) -> Measured:
        handler, events = Handler(self._topic.events), self._topic.events
        async with _manager(self._topic, self._done) as manager:
            dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
            async with self._topic.worker(dispatcher, NOOP, handler) as worker, asyncio.timeout(LONGEST_TURN):
                tally = worker.report().tally
                while tally.duplicates < events:  # noqa: ASYNC110  # a tally tells nobody
                    await asyncio.sleep(0.001)
                assert handler.watch is not None
                found = handler.watch.read(events)
        must(handler.handled == 0, f"{handler.handled} duplicates got through")
        return found


@asynccontextmanager
async def _manager(topic: Topic, scope: str, observer: Observer = SILENT) -> AsyncIterator[IdempotencyManager]:
    manager = IdempotencyManager(IdempotencyConfig(), topic.repository, observer, scope=scope)
    try:
        yield manager
    finally:
        await manager.close()


def _priced(prefix: str, found: Measured, events: int) -> Costs:
    must(found.events == events, f"{found.events} of {events}")
    return {f"{prefix}whole_us": found.cpu / events * 1e6, f"{prefix}wall_us": found.seconds / events * 1e6}


def _answering(handler: Handler) -> EventRouter:
    """As `router_of`, with a result to keep."""
    router = EventRouter()

    @router.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> str:
        await handler.handle(event)
        return RESULT

    return router


async def _dispatched(topic: Topic, records: Mapping[Any, list[Record]]) -> Costs:
    """The service without Kafka, with a store that costs nothing: what the service itself costs."""
    handler = Handler(topic.events)
    manager = IdempotencyManager(IdempotencyConfig(), FreeStore(), scope=new_scope())
    dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
    with without_collector():
        found = await topic.served(dispatcher, NOOP, handler, lambda *_: Log(records))
    await manager.close()
    return {"unattached_us": found.cpu_us}


def derived(found: Costs) -> Costs:
    """What follows from the costs of one round."""
    told = dict(found)
    free = ("decode", "key", "reserve", "settle", "handler")
    told["dispatch_us"] = found["unattached_us"] - sum(found[f"free_{name}_us"] for name in free)
    told["lease_us"] = found["run_us"] - found["plain_call_us"]
    told["di_scope_us"] = found["scoped_call_us"] - found["plain_call_us"]
    # A commit a second, of all partitions, shared by the events of that second.
    told["commit_us"] = found["commit_call_us"] * found["wall_us"] / 1e6
    told["sum_us"] = sum(told[f"{name}_us"] for name in STAGES)
    told["residue_us"] = found["whole_us"] - told["sum_us"]
    for variant in ("telemetry", "scoped", "duplicate", "result", "own_thresholds"):
        told[f"{variant}_more_us"] = found[f"{variant}_whole_us"] - found["whole_us"]
    return told


async def measured(options: Options, tell: Tell) -> Flat:
    """Each cost, as the median of the rounds."""
    async with filled_topic(int(EVENTS * options.seconds), tell) as (topic, place):
        assert isinstance(topic.kafka, KafkaBroker)
        books = Books(place.plain_client(), topic.kafka.pid)
        with Telemetry() as telemetry:
            whole = Whole(topic, books, telemetry)
            _, records = await fetched(topic)
            empty = await books.memory()
            await whole.prepare()
            rounds = await _rounds(_turns(topic, whole, records), options, tell)
            telemetry.check(telemetry.turns * topic.events)
        told = _spreads(rounds)
        client = place.plain_client()
        told |= await _sizes(client, [key async for key in client.scan_iter("idempotency:bench-*", count=1_000)])
        each = (await books.memory() - empty) / (number := await client.dbsize())
        answered = topic.events * (options.rounds + 1) / number
        kept = float(told["cost.record_bytes"]) * (1 - answered) + float(told["cost.result_record_bytes"]) * answered
        told["cost.table_bytes"] = round(each - kept)
        return told | {
            "costs.server": topic.server(place),
            "cost.events": topic.events,
            "cost.result_bytes": len(RESULT) + 2,
        }


def _turns(topic: Topic, whole: Whole, records: Mapping[Any, list[Record]]) -> dict[str, Turn]:
    stages = Stages(records)

    async def fetch() -> Costs:
        return (await fetched(topic))[0]

    async def free() -> Costs:
        return {f"free_{name}": cost for name, cost in (await stages.run(FreeStore())).items()}

    return {
        "fetch and commit": fetch,
        "stages": partial(stages.run, topic.repository),
        "stages with a store that is free": free,
        "service with neither Kafka nor Redis": partial(_dispatched, topic, records),
        "fresh": partial(whole.fresh, ""),
        "duplicates": whole.duplicates,
        "a result": partial(whole.fresh, "result_", router=_answering),
        "Python's own thresholds": whole.own_thresholds,
        "telemetry": whole.with_telemetry,
        "REQUEST scope": whole.with_scope,
    }


async def _rounds(turns: Mapping[str, Turn], options: Options, tell: Tell) -> list[Costs]:
    rounds: list[Costs] = []
    for number in range(options.rounds + 1):
        found: Costs = {}
        for name in turned(list(turns), number):
            gc.collect()
            found |= await turns[name]()
        if number:  # the first round connects, prepares and warms
            rounds.append(derived(found))
        told = derived(found)
        tell(f"round {number}: {told['whole_us']:.1f} µs an event, {told['sum_us']:.1f} by stages")
    return rounds


def _spreads(rounds: list[Costs]) -> Flat:
    told: Flat = {}
    for name in rounds[0]:
        told |= spread_of(f"cost.{name}", [found[name] for found in rounds])
    return told


async def _sizes(client: Redis, keys: list[bytes]) -> Flat:
    """`MEMORY USAGE` of records without a result and with one; values of both lengths are there."""
    found: defaultdict[bool, list[int]] = defaultdict(list)
    for key in keys:
        sizes = found[await client.strlen(key) > len(RESULT)]
        if len(sizes) < SAMPLE:
            sizes.append(await client.memory_usage(key) or 0)
        if all(len(found[kind]) == SAMPLE for kind in (True, False)):
            break
    must(min(len(found[True]), len(found[False])) == SAMPLE, "records of one kind are missing")
    return {
        "cost.record_bytes": median(found[False]),
        "cost.result_record_bytes": median(found[True]),
        "cost.key_bytes": median(map(len, keys)),
    }
