"""What does a guarded call cost, beside the two calls of redis-py that people write by hand?

And beside other libraries, as they come.  Keys are fresh, or known to all as done.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

from benchmarks.contestants import must
from benchmarks.guards import Guard, Idemkit, IdempotencyKit, Ours, Powertools, RawRedis
from benchmarks.measuring import AT_ONCE, Flat, turned
from benchmarks.places import RedisPlace, redis_place
from benchmarks.rounds import Comparison, Measured, Options, Tell, Turn, compared, fresh_keys, in_lanes, spread_of

KEYS: Final = (
    "single_fresh_c1",
    "single_fresh_c64",
    "single_duplicate_c1",
    "single_duplicate_c64",
    "vs_idemkit_fresh_c64",
    "vs_idempotency_kit_fresh_c64",
    "latency_p99_ratio",
)
KNOWN: Final = 2_000
"""Keys that are done before a turn of duplicates begins; gone through again and again."""
LOOKED_AT: Final = 50
"""Duplicates behind a turn whose answers are looked at."""
CALLS: Final = 500
"""Single calls of each in a round of the latency."""
PAUSE: Final = 0.001
"""Seconds between two of them: the load is low."""


async def measured(options: Options, tell: Tell) -> Flat:
    """Each figure of this question."""
    told: Flat = {}
    async with redis_place() as place:
        async for comparison in _comparisons(place):
            told |= await compared(comparison, options, tell)
        if options.wants("latency_p99_ratio"):
            told |= await _latency(await _ours(place), RawRedis(place), options, tell)
        told["single.server"] = place.version
    return told


async def _comparisons(place: RedisPlace) -> AsyncIterator[Comparison]:
    ours, raw = await _ours(place), RawRedis(place)
    peers: Mapping[str, Guard] = {"idemkit": Idemkit(place), "idempotency_kit": IdempotencyKit(place)}
    few: Mapping[str, Guard] = {"ours": ours, "raw": raw, "powertools_sync": Powertools(place)}
    many: Mapping[str, Guard] = {"ours": ours, "raw": raw, **peers}
    vs_peers = {f"vs_{name}_fresh_c64": ("ours", name) for name in peers}
    yield Comparison("fresh_c1", _fresh(few, 1), {"single_fresh_c1": ("ours", "raw")})
    yield Comparison("fresh_c64", _fresh(many, AT_ONCE), {"single_fresh_c64": ("ours", "raw"), **vs_peers})
    yield Comparison("duplicate_c1", await _known(few, 1), {"single_duplicate_c1": ("ours", "raw")})
    yield Comparison("duplicate_c64", await _known(many, AT_ONCE), {"single_duplicate_c64": ("ours", "raw")})


async def _ours(place: RedisPlace) -> Ours:
    return Ours(await place.manager("bench"))


def _fresh(guards: Mapping[str, Guard], at_once: int) -> dict[str, Turn]:
    return {name: fresh(guard, f"{name}-{at_once}", at_once) for name, guard in guards.items()}


async def _known(guards: Mapping[str, Guard], at_once: int) -> dict[str, Turn]:
    return {name: await duplicate(guard, f"{name}-{at_once}-known", at_once) for name, guard in guards.items()}


def fresh(guard: Guard, name: str, at_once: int) -> Turn:
    """Turns of new keys: each must be handled, and blocked when it comes again."""
    keys = fresh_keys(name)

    async def turn(seconds: float) -> Measured:
        before = guard.handled
        found = await in_lanes(guard.once, keys, at_once, seconds)
        must(guard.handled - before == found.events, f"{name}: {guard.handled - before} of {found.events} handled")
        again = next(keys)
        await guard.once(again)
        await _answered(guard, name, [again])
        must(guard.handled - before == found.events + 1, f"{name} lets a duplicate through")
        return found

    return turn


async def duplicate(guard: Guard, name: str, at_once: int, *, known: int = KNOWN) -> Turn:
    """Turns of keys that are done: none may be handled."""
    names = list(itertools.islice(fresh_keys(name), known))
    for start in range(0, known, AT_ONCE):
        await asyncio.gather(*(guard.once(key) for key in names[start : start + AT_ONCE]))
    keys = itertools.cycle(names)

    async def turn(seconds: float) -> Measured:
        before = guard.handled
        found = await in_lanes(guard.once, keys, at_once, seconds)
        await _answered(guard, name, names[:LOOKED_AT])
        must(guard.handled == before, f"{name}: {guard.handled - before} of {found.events} were not blocked")
        return found

    return turn


async def _answered(guard: Guard, name: str, keys: Iterable[str]) -> None:
    """Keys that are done have the answer that they should have."""
    for key in keys:
        answer = await guard.once(key)
        must(answer == guard.answer, f"{name} answers a duplicate with {answer!r}, not {guard.answer!r}")


async def _latency(ours: Guard, raw: Guard, options: Options, tell: Tell) -> Flat:
    """The p99 of single calls.  The two take turns call by call: a hiccup hits whom it hits."""
    ratios, tails = [], {"ours": [0.0], "raw": [0.0]}
    keys = {name: fresh_keys(f"{name}-latency") for name in tails}
    for number in range(options.rounds + 1):
        taken: dict[str, list[float]] = {"ours": [], "raw": []}
        handled = {"ours": ours.handled, "raw": raw.handled}
        for call in range(CALLS if number else CALLS // 5):
            for name, guard in turned([("ours", ours), ("raw", raw)], call):
                await asyncio.sleep(PAUSE)
                start = time.perf_counter()
                await guard.once(next(keys[name]))
                taken[name].append(time.perf_counter() - start)
        for name, guard in (("ours", ours), ("raw", raw)):
            done = guard.handled - handled[name]
            must(done == len(taken[name]), f"{name}: {done} of {len(taken[name])} single calls handled")
        if number:
            p99 = {name: sorted(times)[int(len(times) * 0.99)] * 1e6 for name, times in taken.items()}
            ratios.append(p99["ours"] / p99["raw"])
            for name, value in p99.items():
                tails[name].append(value)
            tell(f"round {number}: p99 ours {p99['ours']:.0f} µs, raw {p99['raw']:.0f} µs")
    key = "latency_p99_ratio"
    told = spread_of(key, ratios)
    tell(f"{key} = {told[key]} ({told[f'{key}.min']}..{told[f'{key}.max']})")
    told |= spread_of(f"{key}.us", tails["ours"][1:]) | spread_of(f"{key}.partner_us", tails["raw"][1:])
    return told
