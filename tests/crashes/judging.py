"""Checks that must hold after all work is settled, no matter which processes died."""

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
    """Keys whose record was COMPLETED at some point: no run may start for them after that.

    A running worker may still start work that it had reserved before it was overtaken; its fence is lower.  Later
    reservations have higher fences.  If no worker was running when the key was completed, no run may start with any
    fence.
    """

    def __init__(self, store: IdempotencyRepository, effects: Effects, prefix: str) -> None:
        """`prefix`: prefix of the keys; their records must not expire or be deleted."""
        self._store = store
        self._effects = effects
        self._prefix = prefix
        self._fences: dict[str, int] = {}
        """Fence of the completion by key."""
        self._started: dict[str, int] = {}
        """Number of started runs by key, counted when no worker was running."""

    def __len__(self) -> int:
        return len(self._fences)

    async def check(self, *, no_worker_running: bool = False) -> None:
        """Compare the records with those of the last check, and remember the completed ones.

        Raises:
            ViolationError: A completed record has changed, or its key ran again.
        """
        records = self._store.scan(self._prefix)
        completed = {
            record.key: record.fence async for record in records if record.status is IdempotencyStatus.COMPLETED
        }
        changed = {key: completed.get(key) for key, fence in self._fences.items() if completed.get(key) != fence}
        if changed:
            raise ViolationError(f"completed records that have changed (key: fence of its completion now): {changed}")
        self._fences = completed
        self._check_starts(no_worker_running=no_worker_running)

    def _check_starts(self, *, no_worker_running: bool) -> None:
        started: defaultdict[str, list[int]] = defaultdict(list)
        for line in self._effects.lines():
            if line.what == "begin":
                started[line.key].append(line.fence)
        for key, fence in self._fences.items():
            later = [other for other in started[key] if other >= fence]
            if len(later) > 1 or any(other > fence for other in later):
                raise ViolationError(f"{key} was completed with fence {fence}, but ran with fences {started[key]}")
            if len(started[key]) > self._started.get(key, len(started[key])):
                raise ViolationError(
                    f"{key} was completed after {self._started[key]} runs, but ran with fences {started[key]}"
                )
        if no_worker_running:
            self._started = {key: len(started[key]) for key in self._fences}


async def judge(
    topics: Topics, effects: Effects, key_prefix: str, store: IdempotencyRepository | None = None
) -> Figures:
    """Compare effects, dead letters, published events and records with the published jobs.

    Args:
        topics: The topics of the trial.
        effects: The effects of its handlers.
        key_prefix: Prefix of its records.
        store: Store of the records; by default, the Redis of the servers.

    Raises:
        ViolationError: Work was lost, done twice in the sink, repeated without the handler being able to tell,
            completed by a run that was overtaken, or is stuck.
    """
    poison = {work for work in topics.published if work.endswith(":poison")}
    figures = effects.judge(set(topics.published), given_up=poison)
    done = effects.done()
    if done & poison:
        raise ViolationError(f"poison jobs had an effect: {sorted(done & poison)}")
    figures["dead_letter_copies"] = await judge_dead_letters(topics, poison)
    await _judge_outgoing(topics, {work for work in done if work.endswith(":talking")})
    records = [record async for record in (store or topics.servers.store).scan(f"{key_prefix}:")]
    stuck = [record.key for record in records if record.status is IdempotencyStatus.PROCESSING]
    if stuck:
        raise ViolationError(f"records that are still PROCESSING: {stuck}")
    figures.update(effects.judge_records(records))
    runs = Counter(line.work for line in effects.lines() if line.what == "begin")
    figures["deliveries"] = len(topics.published)
    figures["reruns"] = sum(times - 1 for times in runs.values())
    return figures


async def judge_dead_letters(topics: Topics, poison: set[str]) -> int:
    """Check that exactly the poison messages have dead letters, and return the number of duplicate dead letters."""
    sources: defaultdict[str, Counter[tuple[bytes, bytes]]] = defaultdict(Counter)
    for dead_letter in await topics.messages("job.dlq"):
        headers = dict(dead_letter.headers)
        source = (headers["idempotency-dlq-partition"], headers["idempotency-dlq-offset"])
        sources[json.loads(dead_letter.value)["work"]][source] += 1
    if set(sources) != poison:
        raise ViolationError(f"dead letters of {sorted(sources)}, expected of {sorted(poison)}")
    wanted = Counter(work for work in topics.published if work in poison)
    missing = {work: times for work, times in wanted.items() if len(sources[work]) != times}
    if missing:
        raise ViolationError(f"poison messages without a dead letter: {missing} of {dict(sources)}")
    return sum(times - 1 for found in sources.values() for times in found.values())


async def _judge_outgoing(topics: Topics, talking: set[str]) -> None:
    """Check that the event of each job was published, with one id for all runs."""
    ids: defaultdict[str, set[str]] = defaultdict(set)
    for message in await topics.messages("job_done"):
        event = json.loads(message.value)
        ids[event["work"]].add(event["event_id"])
    silent, several = talking - set(ids), {work: found for work, found in ids.items() if len(found) > 1}
    if silent or several:
        raise ViolationError(f"published nothing: {sorted(silent)}; under several ids: {several}")


def log_tail(folder: Path) -> str:
    """Return the last log lines of a trial's workers."""
    log = folder / "log"
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:]) if log.exists() else ""
