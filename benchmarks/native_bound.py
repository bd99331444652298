"""How much CPU time of a guarded service could native code save at most?

    python -m benchmarks.native_bound

Native code could replace the pure functions around pydantic's validation: strict JSON and the envelope, key and
fingerprint, the packed requests to Redis, and its answers. Here they are replaced by constants and by tables that are
made before the turn, so that they cost nothing but a lookup. `functions` still creates the Python objects that the
rest of the path needs; `objects` takes these from tables as well. Everything else is the usual service, on a real
Kafka and a real Redis. Turns alternate, with the same tables in memory.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Literal, TypeAlias, get_args
from unittest.mock import patch

import uvloop

from benchmarks.contestants import ensure
from benchmarks.kafka import EVENTS, NOOP, Handler, OrderPlaced, Topic, filled_topic, new_scope, router_of
from benchmarks.measuring import rotated
from benchmarks.rounds import at_least_one
from benchmarks.stages import fetch_all
from integr8s_idem import IdempotencyConfig, IdempotencyManager, IdempotentEventDispatcher
from integr8s_idem.cli.garbage_collection import collect_rarely
from integr8s_idem.engine.store_client import StoreClient
from integr8s_idem.engine.work import Work
from integr8s_idem.events import EventDecoder
from integr8s_idem.handlers.handler import GuardedExecution
from integr8s_idem.keys import Key, KeyedWork, KeyResolver
from integr8s_idem.records import Completion, Reserved, ReserveRequest, StoredResult, Verdict
from integr8s_idem.stores.redis import codec, round_trips, scripts, servers
from integr8s_idem.stores.redis.repository import RecordsInRedis

Variant: TypeAlias = Literal["python", "functions", "objects"]
VARIANTS: Final[tuple[Variant, ...]] = get_args(Variant)

TOKEN: Final = b"bound".ljust(codec.TOKEN_BYTES, b".")
"""Stored for every reservation, so that requests can be packed in advance."""
COMPLETED: Final = codec.encode_completion(
    Completion(
        reservation=Reserved(key="", token=TOKEN, attempt=1, fence=0, lease=IdempotencyConfig().lease),
        ttl=IdempotencyConfig().ttl,
        result=StoredResult(codec.NULL),
    )
)
_set_fence: Final[Callable[[Reserved, int], None]] = vars(Reserved)["fence"].__set__


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


@dataclass(slots=True)
class Prepared:
    """What the native code would have to compute for one event."""

    text: str
    name: str
    keyed: KeyedWork
    request: ReserveRequest
    reserved: Reserved
    packed_key: bytes
    packed_request: bytes


class Tables:
    """The prepared events of one turn, by event id, by key of the work, and by key in the store."""

    def __init__(self, bodies: Sequence[bytes], manager: IdempotencyManager, dispatcher: IdempotentEventDispatcher):
        self.by_event: dict[str, Prepared] = {}
        self.by_work: dict[str, Prepared] = {}
        self.by_key: dict[str, Prepared] = {}
        self._outcomes: dict[int, bytes] = {}
        client, decoder = manager.executor.client, EventDecoder([OrderPlaced])
        for body in bodies:
            event = decoder.decode(body)
            execution = dispatcher.executions(event)[0]
            assert isinstance(execution, GuardedExecution)
            prepared = _prepared(client.request(execution.work), execution.work)
            self.by_event[event.event_id] = self.by_work[prepared.text] = prepared
            self.by_key[prepared.request.key] = prepared
        self._ttl = codec.encode_life(IdempotencyConfig().ttl)

    def reserve_command(self, keys: Sequence[str]) -> bytes:
        """Return the packed call of `reserve.lua`."""
        found = [self.by_key[key] for key in keys]
        head = b"*%d\r\n" % (3 + 2 * len(keys))
        return b"".join(
            [head, _call(scripts.RESERVE, keys), *[p.packed_key for p in found], *[p.packed_request for p in found]]
        )

    def settle_command(self, keys: Sequence[str], fences: Sequence[int]) -> bytes:
        """Return the packed call of `settle.lua`."""
        head = b"*%d\r\n" % (4 + 2 * len(keys))
        packed = [self.by_key[key].packed_key for key in keys]
        outcomes = [self._outcomes.get(fence) or self._outcome(fence) for fence in fences]
        return b"".join([head, _call(scripts.SETTLE, keys), *packed, _bulk(bytes((codec.COMPLETED,))), *outcomes])

    def _outcome(self, fence: int) -> bytes:
        """Return the packed outcome, which is the same for all keys that were reserved together."""
        packed = _bulk(self._ttl + fence.to_bytes(7, "big") + TOKEN + COMPLETED)
        self._outcomes[fence] = packed
        return packed


def _call(script: scripts.Script, keys: Sequence[str]) -> bytes:
    return _bulk(b"EVALSHA") + _bulk(script.sha.encode()) + _bulk(b"%d" % len(keys))


def _prepared(request: ReserveRequest, work: Work) -> Prepared:
    reserved = Reserved(key=request.key, token=request.token, attempt=1, fence=0, lease=request.lease)
    return Prepared(
        work.key.text,
        work.key.name,
        KeyedWork(work.key, work.fingerprint),
        request,
        reserved,
        _bulk(request.key.encode()),
        _bulk(codec.encode_reserve(replace(request, token=TOKEN))),
    )


@contextmanager
def replaced(tables: Tables, *, objects: bool) -> Iterator[None]:
    """Replace what native code could replace; with `objects`, also take the Python objects from tables."""
    validate, pack, command_of = (
        OrderPlaced.__pydantic_validator__.validate_json, round_trips.pack_command, scripts.command_of
    )  # fmt: skip
    by_event, by_work, by_key = tables.by_event, tables.by_work, tables.by_key

    def decode(_: EventDecoder, body: bytes, __: object = ()) -> Any:
        return validate(body)

    def resolve(_: KeyResolver, __: str, event: Any, generation: int = 0) -> KeyedWork:
        prepared = by_event[event.event_id]
        if objects:
            return prepared.keyed
        return KeyedWork(Key(prepared.text, prepared.name, generation), prepared.keyed.fingerprint)

    def request(_: StoreClient, work: Work, __: object = None) -> ReserveRequest:
        return by_work[work.key.text].request

    def command(script: scripts.Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        if script is scripts.RESERVE:
            return tables.reserve_command(keys)
        if script is scripts.SETTLE:
            return tables.settle_command(keys, args)
        return command_of(script, keys, args)

    def pack_once(given: Any) -> bytes:
        return given if type(given) is bytes else pack(given)

    async def reserve(self: Any, requests: Sequence[ReserveRequest]) -> list[Verdict | None]:
        keys = [each.key for each in requests]
        verdicts: list[Verdict | None] = []
        for indexes, (now_us, *answers) in await self._servers.run(scripts.RESERVE, keys, keys):
            ensure(not any(answers), "a key was not new")
            for index in indexes:
                given = requests[index]
                if objects:
                    reserved = by_key[given.key].reserved
                    _set_fence(reserved, now_us)
                else:
                    reserved = Reserved(
                        key=given.key, token=given.token, attempt=1, fence=now_us, lease=given.lease
                    )  # fmt: skip
                verdicts.append(reserved)
        return verdicts

    async def complete(self: Any, completions: Sequence[Completion]) -> list[bool]:
        reservations = [each.reservation for each in completions]
        keys, fences = [each.key for each in reservations], [each.fence for each in reservations]
        written: list[bool] = []
        for _, answers in await self._servers.run(scripts.SETTLE, keys, fences):
            written += answers
        return written

    with (
        patch.object(EventDecoder, "decode", decode),
        patch.object(KeyResolver, "resolve", resolve),
        patch.object(RecordsInRedis, "_reserve", reserve),
        patch.object(RecordsInRedis, "complete", complete),
        patch.object(servers, "command_of", command),
        patch.object(round_trips, "command_of", command),
        patch.object(round_trips, "pack_command", pack_once),
        patch.object(StoreClient, "request", request if objects else StoreClient.request),
    ):
        yield


async def turn(topic: Topic, bodies: Sequence[bytes], variant: Variant) -> dict[str, float]:
    """Return the microseconds of CPU time that the service takes for an event, and the lookups of its tables."""
    handler = Handler(topic.events)
    manager = IdempotencyManager(IdempotencyConfig(), topic.repository, scope=new_scope())
    dispatcher = IdempotentEventDispatcher(router_of(handler), manager)
    tables = Tables(bodies, manager, dispatcher)
    gc.collect()
    gc.freeze()  # the tables are no part of a service
    try:
        if variant == "python":
            measured = await topic.serve(dispatcher, NOOP, handler)
        else:
            with replaced(tables, objects=variant == "objects"):
                measured = await topic.serve(dispatcher, NOOP, handler)
    finally:
        gc.unfreeze()
        await manager.close()
    return {variant: measured.cpu_us, "lookups": _lookups(tables)}


def _lookups(tables: Tables) -> float:
    """Return the microseconds that the tables themselves take for an event."""
    keys = list(tables.by_key)
    before = time.process_time()
    for start in range(0, len(keys), servers.AT_ONCE):
        part = keys[start : start + servers.AT_ONCE]
        tables.reserve_command(part)
        tables.settle_command(part, [0] * len(part))
    return (time.process_time() - before) / len(keys) * 1e6


async def _measure(rounds: int, events: int) -> list[Mapping[str, float]]:
    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    collect_rarely()
    results: list[Mapping[str, float]] = []
    async with filled_topic(events, progress) as (topic, _):
        _, records = await fetch_all(topic)
        bodies = [record.value for part in records.values() for record in part]
        for number in range(rounds + 1):
            found: dict[str, float] = {}
            for variant in rotated(list(VARIANTS), number):
                found |= await turn(topic, bodies, variant)
            progress(", ".join(f"{name} {value:.2f}" for name, value in sorted(found.items())))
            if number:  # the first round warms up
                results.append(found)
    return results


def _show(results: Sequence[Mapping[str, float]]) -> None:
    for name in (*VARIANTS, "lookups"):
        values = [each[name] for each in results]
        print(f"{name:10} {min(values):6.2f} µs at least, median {median(values):6.2f}")
    for name in VARIANTS[1:]:
        # What the tables take is no cost of native code.
        savings = [1 - (each[name] - each["lookups"]) / each["python"] for each in results]
        fastest = 1 - (min(each[name] - each["lookups"] for each in results)) / min(each["python"] for each in results)
        print(
            f"{name:10} saves {median(savings):.1%} of the CPU time of a round (median; {min(savings):.1%} to "
            f"{max(savings):.1%}), {fastest:.1%} of the minimum"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_bound", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=9, help="counted rounds (default: %(default)s)")
    parser.add_argument("--events", type=at_least_one, default=EVENTS, help="events in a turn (default: %(default)s)")
    arguments = parser.parse_args()
    _show(uvloop.run(_measure(arguments.rounds, arguments.events)))


if __name__ == "__main__":
    main()
