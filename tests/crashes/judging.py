"""What must hold once all is quiet, whoever died on the way."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.campaigns.figures import Figures, ViolationError
from tests.crashes.ground import Topics
from tests.support.effects import Effects


async def judge(topics: Topics, effects: Effects, key_prefix: str) -> Figures:
    """Compare effects, dead letters, published events and records with what was asked for.

    Raises:
        ViolationError: Something was lost, done twice in the sink, repeated in silence, or is stuck.
    """
    poison = {work for work in topics.published if work.endswith(":poison")}
    figures = effects.judge(set(topics.published), given_up=poison)
    done = effects.done()
    if done & poison:
        raise ViolationError(f"poison had an effect: {sorted(done & poison)}")
    figures["dead_letter_copies"] = await _letters(topics, poison)
    await _outgoing(topics, {work for work in done if work.endswith(":talking")})
    stuck = await topics.ground.unsettled(f"{key_prefix}:")
    if stuck:
        raise ViolationError(f"records that nobody will settle: {stuck}")
    begun = Counter(line.work for line in effects.lines() if line.what == "begin")
    figures["deliveries"] = len(topics.published)
    figures["reruns"] = sum(times - 1 for times in begun.values())
    return figures


async def _letters(topics: Topics, poison: set[str]) -> int:
    """Every copy of poison has its letter, nothing else has; the number of letters beyond one a message."""
    places: defaultdict[str, Counter[tuple[bytes, bytes]]] = defaultdict(Counter)
    for letter in await topics.messages("job.dlq"):
        told = dict(letter.headers)
        where = (told["idempotency-dlq-partition"], told["idempotency-dlq-offset"])
        places[json.loads(letter.value)["work"]][where] += 1
    if set(places) != poison:
        raise ViolationError(f"dead letters of {sorted(places)}, expected of {sorted(poison)}")
    wanted = Counter(work for work in topics.published if work in poison)
    missing = {work: times for work, times in wanted.items() if len(places[work]) != times}
    if missing:
        raise ViolationError(f"deliveries of poison without a letter of their own: {missing} of {dict(places)}")
    return sum(times - 1 for found in places.values() for times in found.values())


async def _outgoing(topics: Topics, talking: set[str]) -> None:
    """What a job publishes is there, under one id, however often it ran."""
    ids: defaultdict[str, set[str]] = defaultdict(set)
    for message in await topics.messages("job_done"):
        told = json.loads(message.value)
        ids[told["work"]].add(told["event_id"])
    silent, many = talking - set(ids), {work: found for work, found in ids.items() if len(found) > 1}
    if silent or many:
        raise ViolationError(f"published nothing: {sorted(silent)}; under several ids: {many}")


def last_words(folder: Path) -> str:
    """The end of what the workers of a trial have logged."""
    log = folder / "log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else ""
