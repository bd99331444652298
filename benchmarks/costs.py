"""What does an event cost, stage by stage, in the worker, in Redis and in Kafka?

Each stage is measured alone, on real components (`stages.py`). Their sum is compared with the whole service in the same
round, and the residue is reported. Variants are whole services, compared with the plain one.
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
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from benchmarks.contestants import ensure
from benchmarks.cost_tables import VARIANTS
from benchmarks.kafka import LONGEST_TURN, NOOP, Handler, OrderPlaced, Topic, filled_topic, new_scope, router_of
from benchmarks.measuring import Flat, rotated
from benchmarks.observers import Telemetry, check_handled
from benchmarks.rounds import Measured, Options, Progress, spread_of
from benchmarks.stages import Costs, FreeStore, Log, Record, Stages, collector, fetch_all, scoped, without_collector
from integr8s_idem import EventRouter, IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.handlers.handler_calls import call_with_event
from integr8s_idem.handlers.router import Invoke
from integr8s_idem.telemetry import SILENT, Observer
from integr8s_idem.telemetry.prometheus import PrometheusObserver
from tests.support.kafka.broker import KafkaBroker

EVENTS: Final = 5_000
RESULT: Final = "x" * 198
"""200 bytes as stored, with quotation marks."""
PYTHON_THRESHOLDS: Final = (700, 10, 10)
"""Default thresholds of the garbage collector in Python 3.11 and 3.12."""
SAMPLE: Final = 200
"""Number of keys of each kind whose memory is measured."""
STAGES: Final = ("fetch", "decode", "key", "reserve", "dispatch", "handler", "settle", "commit", "gc")
"""Stages of a new event in a service without Dishka and telemetry."""

Turn: TypeAlias = Callable[[], Awaitable[Costs]]


class ServerCounters:
    """CPU time and traffic of Redis and the broker."""

    def __init__(self, client: Redis, broker: int) -> None:
        self._client = client
        self._broker = psutil.Process(broker)

    async def read(self) -> Costs:
        """Read the totals: microseconds and bytes."""
        info: dict[str, Any] = await self._client.info("everything")
        scripts = info.get("cmdstat_evalsha", {})
        broker = self._broker.cpu_times()
        return {
            "redis_us": (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6,
            "redis_script_us": scripts.get("usec", 0),
            "redis_in_bytes": info["total_net_input_bytes"],
            "redis_out_bytes": info["total_net_output_bytes"],
            "broker_us": (broker.user + broker.system) * 1e6,
        }

    async def memory(self) -> float:
        """Return the bytes used by records and the tables that hold them."""
        info: dict[str, Any] = await self._client.info("memory")
        return float(info["used_memory"] - info["mem_clients_normal"] - info["mem_aof_buffer"])


class WholeService:
    """Whole services on a real Kafka and a real Redis."""

    def __init__(self, topic: Topic, counters: ServerCounters, telemetry: Telemetry) -> None:
        self._topic = topic
        self._counters = counters
        self._telemetry = telemetry
        self._done_scope = new_scope()
        """A scope in which all events are completed."""

    async def prepare(self) -> None:
        await self.fresh("", self._done_scope)

    async def fresh(
        self, prefix: str, scope: str = "", *, router: Callable[[Handler], EventRouter] = router_of
    ) -> Costs:
        """Handle new events."""
        handler = Handler(self._topic.events)
        return await self._with_server_costs(prefix, self._run(handler, router(handler), scope or new_scope()))

    async def python_thresholds(self) -> Costs:
        """Handle new events with Python's default garbage collector thresholds; frozen objects stay frozen."""
        before = gc.get_threshold()
        gc.set_threshold(*PYTHON_THRESHOLDS)
        try:
            return await self.fresh("own_thresholds_")
        finally:
            gc.set_threshold(*before)

    async def with_metrics(self) -> Costs:
        """Handle new events with metrics, as by default."""
        registry = CollectorRegistry()
        costs = await self._observed("metrics_", PrometheusObserver("bench", registry))
        check_handled(registry, self._topic.events)
        return costs

    async def with_telemetry(self) -> Costs:
        """Handle new events with metrics for all, and spans for a sample."""
        self._telemetry.turns += 1
        return await self._observed("telemetry_", self._telemetry.observer)

    async def _observed(self, prefix: str, observer: Observer) -> Costs:
        handler = Handler(self._topic.events)
        measured = await self._run(handler, router_of(handler), new_scope(), observer=observer)
        return _times(prefix, measured, self._topic.events)

    async def with_scope(self) -> Costs:
        """Handle each new event in a Dishka REQUEST scope, with one dependency."""
        handler = Handler(self._topic.events)
        async with scoped(handler) as (router, invoke):
            measured = await self._run(handler, router, new_scope(), invoke=invoke)
        return _times("scoped_", measured, self._topic.events)

    async def duplicates(self) -> Costs:
        """Receive events that are completed already."""
        return await self._with_server_costs("duplicate_", self._run_duplicates())

    async def _with_server_costs(self, prefix: str, turn: Awaitable[Measured]) -> Costs:
        before = await self._counters.read()
        with collector() as collected:
            measured = await turn
        after, events = await self._counters.read(), self._topic.events
        results = {f"{prefix}{name}": (after[name] - before[name]) / events for name in before}
        results |= {f"{prefix}{name}": cost for name, cost in collected.us(events).items()}
        return {**results, **_times(prefix, measured, events)}

    async def _run(
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
            return await self._topic.serve(dispatcher, NOOP, handler)

    async def _run_duplicates(self) -> Measured:
        handler, events = Handler(self._topic.events), self._topic.events
        async with _manager(self._topic, self._done_scope) as manager:
            dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
            async with self._topic.worker(dispatcher, NOOP, handler) as worker, asyncio.timeout(LONGEST_TURN):
                tally = worker.report().tally
                while tally.duplicates < events:  # noqa: ASYNC110  # a tally has no event to wait for
                    await asyncio.sleep(0.001)
                assert handler.watch is not None
                measured = handler.watch.read(events)
        ensure(handler.handled == 0, f"{handler.handled} duplicates got through")
        return measured


@asynccontextmanager
async def _manager(topic: Topic, scope: str, observer: Observer = SILENT) -> AsyncIterator[IdempotencyManager]:
    manager = IdempotencyManager(IdempotencyConfig(), topic.repository, observer, scope=scope)
    try:
        yield manager
    finally:
        await manager.close()


def _times(prefix: str, measured: Measured, events: int) -> Costs:
    ensure(measured.events == events, f"{measured.events} of {events} handled")
    return {f"{prefix}whole_us": measured.cpu / events * 1e6, f"{prefix}wall_us": measured.seconds / events * 1e6}


def _router_with_result(handler: Handler) -> EventRouter:
    """Create a router as `router_of` does, whose handler returns a result."""
    router = EventRouter()

    @router.on(OrderPlaced)
    async def ship(event: OrderPlaced) -> str:
        await handler.handle(event)
        return RESULT

    return router


async def _without_servers(topic: Topic, records: Mapping[Any, list[Record]]) -> Costs:
    """Measure the service without Kafka, with a store that costs nothing."""
    handler = Handler(topic.events)
    manager = IdempotencyManager(IdempotencyConfig(), FreeStore(), scope=new_scope())
    dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
    with without_collector():
        measured = await topic.serve(dispatcher, NOOP, handler, lambda *_: Log(records))
    await manager.close()
    return {"unattached_us": measured.cpu_us}


def derive(costs: Costs) -> Costs:
    """Derive further costs from those of one round."""
    results = dict(costs)
    free_stages = ("decode", "key", "reserve", "settle", "handler")
    results["dispatch_us"] = costs["unattached_us"] - sum(costs[f"free_{name}_us"] for name in free_stages)
    results["lease_us"] = costs["run_us"] - costs["plain_call_us"]
    results["di_scope_us"] = costs["scoped_call_us"] - costs["plain_call_us"]
    # One commit per second, for all partitions, divided among the events of that second.
    results["commit_us"] = costs["commit_call_us"] * costs["wall_us"] / 1e6
    results["sum_us"] = sum(results[f"{name}_us"] for name in STAGES)
    results["residue_us"] = costs["whole_us"] - results["sum_us"]
    for variant in VARIANTS:
        results[f"{variant}_more_us"] = costs[f"{variant}_whole_us"] - costs["whole_us"]
    return results


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each cost, as the median of the rounds."""
    async with filled_topic(int(EVENTS * options.seconds), progress) as (topic, env):
        assert isinstance(topic.kafka, KafkaBroker)
        counters = ServerCounters(env.plain_client(), topic.kafka.pid)
        with Telemetry() as telemetry:
            service = WholeService(topic, counters, telemetry)
            _, records = await fetch_all(topic)
            empty = await counters.memory()
            await service.prepare()
            rounds = await _rounds(_turns(topic, service, records), options, progress)
            telemetry.check(telemetry.turns * topic.events)
        results = _spreads(rounds)
        client = env.plain_client()
        results |= await _sizes(client, [key async for key in client.scan_iter("idempotency:bench-*", count=1_000)])
        bytes_per_record = (await counters.memory() - empty) / (number := await client.dbsize())
        with_result = topic.events * (options.rounds + 1) / number
        record_bytes = (
            float(results["cost.record_bytes"]) * (1 - with_result)
            + float(results["cost.result_record_bytes"]) * with_result
        )
        results["cost.table_bytes"] = round(bytes_per_record - record_bytes)
        return results | {
            "costs.server": topic.server(env),
            "cost.events": topic.events,
            "cost.result_bytes": len(RESULT) + 2,
        }


def _turns(topic: Topic, service: WholeService, records: Mapping[Any, list[Record]]) -> dict[str, Turn]:
    stages = Stages(records)

    async def fetch() -> Costs:
        return (await fetch_all(topic))[0]

    async def free_stages() -> Costs:
        return {f"free_{name}": cost for name, cost in (await stages.run(FreeStore())).items()}

    return {
        "fetch and commit": fetch,
        "stages": partial(stages.run, topic.repository),
        "stages with a store that costs nothing": free_stages,
        "service without Kafka and Redis": partial(_without_servers, topic, records),
        "fresh": partial(service.fresh, ""),
        "duplicates": service.duplicates,
        "with a result": partial(service.fresh, "result_", router=_router_with_result),
        "Python's default thresholds": service.python_thresholds,
        "metrics": service.with_metrics,
        "telemetry": service.with_telemetry,
        "REQUEST scope": service.with_scope,
    }


async def _rounds(turns: Mapping[str, Turn], options: Options, progress: Progress) -> list[Costs]:
    rounds: list[Costs] = []
    for number in range(options.rounds + 1):
        costs: Costs = {}
        for name in rotated(list(turns), number):
            gc.collect()
            costs |= await turns[name]()
        if number:  # the first round warms up
            rounds.append(derive(costs))
        results = derive(costs)
        progress(
            f"round {number}: {results['whole_us']:.1f} µs per event, {results['sum_us']:.1f} as the sum of stages"
        )
    return rounds


def _spreads(rounds: list[Costs]) -> Flat:
    results: Flat = {}
    for name in rounds[0]:
        results |= spread_of(f"cost.{name}", [costs[name] for costs in rounds])
    return results


async def _sizes(client: Redis, keys: list[bytes]) -> Flat:
    """Measure `MEMORY USAGE` of records without and with a result, distinguished by length."""
    sizes_by_kind: defaultdict[bool, list[int]] = defaultdict(list)
    for key in keys:
        sizes = sizes_by_kind[await client.strlen(key) > len(RESULT)]
        if len(sizes) < SAMPLE:
            sizes.append(await client.memory_usage(key) or 0)
        if all(len(sizes_by_kind[kind]) == SAMPLE for kind in (True, False)):
            break
    ensure(
        min(len(sizes_by_kind[True]), len(sizes_by_kind[False])) == SAMPLE, "too few records with or without a result"
    )
    return {
        "cost.record_bytes": median(sizes_by_kind[False]),
        "cost.result_record_bytes": median(sizes_by_kind[True]),
        "cost.key_bytes": median(map(len, keys)),
    }
