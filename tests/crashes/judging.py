"""What must hold once all is quiet, whoever died on the way."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from integr8s_idem import IdempotencyStatus
from integr8s_idem.stores import IdempotencyRepository
from tests.campaigns.figures import Figures, ViolationError
from tests.crashes.ground import Topics
from tests.support.effects import Effects


class CompletedKeys:
    """Keys whose record was seen COMPLETED: from then on nothing may happen under them.

    A worker that lives may still begin, late, what it reserved before somebody overtook it, by a lower fence; what
    was reserved later has a higher one.  A worker that is dead begins nothing: what was completed while none lived
    is not begun again by any fence.
    """

    def __init__(self, store: IdempotencyRepository, effects: Effects, prefix: str) -> None:
        """`prefix`: of the keys; no record of them may go meanwhile."""
        self._store = store
        self._effects = effects
        self._prefix = prefix
        self._fences: dict[str, int] = {}
        """By key: the fence of its completion."""
        self._begun: dict[str, int] = {}
        """By key: how often runs had begun when no worker lived."""

    def __len__(self) -> int:
        return len(self._fences)

    async def look(self, *, nobody_lives: bool = False) -> None:
        """Compare what is now with what was seen before, and remember what is completed now.

        Raises:
            ViolationError: A completed record has changed, or its key was run again.
        """
        records = self._store.scan(self._prefix)
        completed = {
            record.key: record.fence async for record in records if record.status is IdempotencyStatus.COMPLETED
        }
        changed = {key: completed.get(key) for key, fence in self._fences.items() if completed.get(key) != fence}
        if changed:
            raise ViolationError(f"completed, and no longer as it was (key, fence of its completion now): {changed}")
        self._fences = completed
        self._judge_begins(nobody_lives=nobody_lives)

    def _judge_begins(self, *, nobody_lives: bool) -> None:
        begun: defaultdict[str, list[int]] = defaultdict(list)
        for line in self._effects.lines():
            if line.what == "begin":
                begun[line.key].append(line.fence)
        for key, fence in self._fences.items():
            behind = [other for other in begun[key] if other >= fence]
            if len(behind) > 1 or any(other > fence for other in behind):
                raise ViolationError(f"{key} was completed by fence {fence}, and run by {begun[key]}")
            if len(begun[key]) > self._begun.get(key, len(begun[key])):
                raise ViolationError(f"{key} was completed after {self._begun[key]} runs, and run by {begun[key]}")
        if nobody_lives:
            self._begun = {key: len(begun[key]) for key in self._fences}


async def judge(
    topics: Topics, effects: Effects, key_prefix: str, store: IdempotencyRepository | None = None
) -> Figures:
    """Compare effects, dead letters, published events and records with what was asked for.

    Args:
        store: Where the records are; the Redis of the ground if not given.

    Raises:
        ViolationError: Something was lost, done twice in the sink, repeated in silence, completed by a run that
            was overtaken, or is stuck.
    """
    poison = {work for work in topics.published if work.endswith(":poison")}
    figures = effects.judge(set(topics.published), given_up=poison)
    done = effects.done()
    if done & poison:
        raise ViolationError(f"poison had an effect: {sorted(done & poison)}")
    figures["dead_letter_copies"] = await judge_letters(topics, poison)
    await _outgoing(topics, {work for work in done if work.endswith(":talking")})
    records = [record async for record in (store or topics.ground.store).scan(f"{key_prefix}:")]
    stuck = [record.key for record in records if record.status is IdempotencyStatus.PROCESSING]
    if stuck:
        raise ViolationError(f"records that nobody will settle: {stuck}")
    figures.update(effects.judge_records(records))
    begun = Counter(line.work for line in effects.lines() if line.what == "begin")
    figures["deliveries"] = len(topics.published)
    figures["reruns"] = sum(times - 1 for times in begun.values())
    return figures


async def judge_letters(topics: Topics, poison: set[str]) -> int:
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
