"""What does a guarded call cost, compared with two hand-written redis-py calls, and with other libraries?

Keys are new, or completed already.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Final

from benchmarks.contestants import ensure
from benchmarks.guards import (
    BareRequests,
    Guard,
    Idemkit,
    IdempotencyKit,
    Integr8sIdem,
    Powertools,
    RawRedis,
    RequestsWithParts,
)
from benchmarks.measuring import CONCURRENCY, Flat, rotated
from benchmarks.native import NATIVE, native_code, with_native_code
from benchmarks.places import RedisEnvironment, redis_environment
from benchmarks.rounds import (
    Comparison,
    Measured,
    Options,
    Progress,
    Turn,
    compare,
    fresh_keys,
    run_concurrently,
    spread_of,
)

KEYS: Final = (
    "single_fresh_c1",
    "single_fresh_c64",
    "single_duplicate_c1",
    "single_duplicate_c64",
    "single_fresh_c1_native",
    "single_fresh_c64_native",
    "single_duplicate_c1_native",
    "single_duplicate_c64_native",
    "single_fresh_c1_requests",
    "single_fresh_c64_requests",
    "single_duplicate_c1_requests",
    "single_duplicate_c64_requests",
    "single_fresh_c1_parts",
    "single_duplicate_c1_parts",
    "vs_idemkit_fresh_c64",
    "vs_idempotency_kit_fresh_c64",
    "latency_p99_ratio",
)
NATIVE_NAME: Final = "integr8s_idem_native"
COMPLETED_KEYS: Final = 2_000
"""Number of keys completed before the turns of duplicates, which cycle through them."""
CHECKED: Final = 50
"""Number of duplicates whose results are checked after a turn."""
CALLS: Final = 500
"""Number of calls per contestant in a round of the latency figure."""
PAUSE: Final = 0.001
"""Seconds between two calls, for a low load."""


async def measure(options: Options, progress: Progress) -> Flat:
    """Measure each figure of this benchmark."""
    results: Flat = {}
    async with redis_environment() as env:
        async for comparison in _comparisons(env):
            results |= await compare(comparison, options, progress)
        if options.wants("latency_p99_ratio"):
            results |= await _latency(await _this_library(env), RawRedis(env), options, progress)
        results["single.server"] = env.version
    return results


async def _comparisons(env: RedisEnvironment) -> AsyncIterator[Comparison]:
    library, raw, requests = await _this_library(env), RawRedis(env), BareRequests(await env.repository())
    peers: Mapping[str, Guard] = {"idemkit": Idemkit(env), "idempotency_kit": IdempotencyKit(env)}
    both: Mapping[str, Guard] = {"integr8s_idem": library, "raw": raw, "requests": requests}
    parts = RequestsWithParts(await env.repository())
    sequential: Mapping[str, Guard] = {**both, "parts": parts, "powertools_sync": Powertools(env)}
    concurrent: Mapping[str, Guard] = {**both, **peers}
    vs_peers = {f"vs_{name}_fresh_c64": ("integr8s_idem", name) for name in peers}
    for kind, turns_of in (("fresh", _new_keys), ("duplicate", _duplicates)):
        for concurrency, guards in ((1, sequential), (CONCURRENCY, concurrent)):
            name = f"{kind}_c{concurrency}"
            turns = await turns_of(guards, concurrency)
            figures = {f"single_{name}": ("integr8s_idem", "raw"), f"single_{name}_requests": ("requests", "raw")}
            if guards is sequential:
                figures[f"single_{name}_parts"] = ("parts", "raw")
            elif kind == "fresh":
                figures |= vs_peers
            if NATIVE is not None:
                with native_code():
                    of_native = await turns_of({NATIVE_NAME: await _this_library(env)}, concurrency)
                turns[NATIVE_NAME] = with_native_code(of_native[NATIVE_NAME])
                figures[f"single_{name}_native"] = (NATIVE_NAME, "raw")
            yield Comparison(name, turns, figures)


async def _this_library(env: RedisEnvironment) -> Integr8sIdem:
    return Integr8sIdem(await env.manager("bench"))


async def _new_keys(guards: Mapping[str, Guard], concurrency: int) -> dict[str, Turn]:
    return {name: fresh(guard, f"{name}-{concurrency}", concurrency) for name, guard in guards.items()}


async def _duplicates(guards: Mapping[str, Guard], concurrency: int) -> dict[str, Turn]:
    return {name: await duplicate(guard, f"{name}-{concurrency}-known", concurrency) for name, guard in guards.items()}


def fresh(guard: Guard, name: str, concurrency: int) -> Turn:
    """Create a turn of new keys, each of which must be handled once; a duplicate is checked at its end."""
    keys = fresh_keys(name)

    async def turn(seconds: float) -> Measured:
        before = guard.handled
        measured = await run_concurrently(guard.once, keys, concurrency, seconds)
        ensure(
            guard.handled - before == measured.events, f"{name}: {guard.handled - before} of {measured.events} handled"
        )
        key = next(keys)
        await guard.once(key)
        await _check_answers(guard, name, [key])
        ensure(guard.handled - before == measured.events + 1, f"{name} lets a duplicate through")
        return measured

    return turn


async def duplicate(guard: Guard, name: str, concurrency: int, *, completed: int = COMPLETED_KEYS) -> Turn:
    """Complete keys, and create a turn of their duplicates, none of which may be handled."""
    names = list(itertools.islice(fresh_keys(name), completed))
    for start in range(0, completed, CONCURRENCY):
        await asyncio.gather(*(guard.once(key) for key in names[start : start + CONCURRENCY]))
    keys = itertools.cycle(names)

    async def turn(seconds: float) -> Measured:
        before = guard.handled
        measured = await run_concurrently(guard.once, keys, concurrency, seconds)
        await _check_answers(guard, name, names[:CHECKED])
        ensure(guard.handled == before, f"{name}: {guard.handled - before} of {measured.events} were not blocked")
        return measured

    return turn


async def _check_answers(guard: Guard, name: str, keys: Iterable[str]) -> None:
    """Raise AssertionError unless duplicates of `keys` return the expected result."""
    for key in keys:
        answer = await guard.once(key)
        ensure(answer == guard.answer, f"{name} returns {answer!r} for a duplicate, not {guard.answer!r}")


async def _latency(library: Guard, raw: Guard, options: Options, progress: Progress) -> Flat:
    """Measure the p99 of single calls. The contestants alternate call by call, so that hiccups affect both equally."""
    ratios, tails = [], {"integr8s_idem": [0.0], "raw": [0.0]}
    keys = {name: fresh_keys(f"{name}-latency") for name in tails}
    for number in range(options.rounds + 1):
        taken: dict[str, list[float]] = {"integr8s_idem": [], "raw": []}
        handled = {"integr8s_idem": library.handled, "raw": raw.handled}
        for call in range(CALLS if number else CALLS // 5):
            for name, guard in rotated([("integr8s_idem", library), ("raw", raw)], call):
                await asyncio.sleep(PAUSE)
                start = time.perf_counter()
                await guard.once(next(keys[name]))
                taken[name].append(time.perf_counter() - start)
        for name, guard in (("integr8s_idem", library), ("raw", raw)):
            done = guard.handled - handled[name]
            ensure(done == len(taken[name]), f"{name}: {done} of {len(taken[name])} single calls handled")
        if number:
            p99 = {name: sorted(times)[int(len(times) * 0.99)] * 1e6 for name, times in taken.items()}
            ratios.append(p99["integr8s_idem"] / p99["raw"])
            for name, value in p99.items():
                tails[name].append(value)
            progress(f"round {number}: p99 this library {p99['integr8s_idem']:.0f} µs, raw {p99['raw']:.0f} µs")
    key = "latency_p99_ratio"
    results = spread_of(key, ratios)
    progress(f"{key} = {results[key]} ({results[f'{key}.min']}..{results[f'{key}.max']})")
    results |= spread_of(f"{key}.us", tails["integr8s_idem"][1:]) | spread_of(f"{key}.partner_us", tails["raw"][1:])
    return results
