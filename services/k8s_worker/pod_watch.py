"""Wait for the end of a Job: list its pods, watch them, and list again whenever the watch ends.

Every round starts by reading the current state, so a dropped connection, an outdated version or a missed event only
ends the round.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from time import monotonic
from typing import Any, Final

from services.k8s_worker.cluster import Cluster, UnansweredError
from services.k8s_worker.pod_status import ended_pod, has_begun, is_hopeless, job_end, message_of, why_waiting

WATCH_SECONDS: Final = 30
"""Maximum duration of a watch.  A Job that ends without an event of its pods is noticed after that."""
FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 10.0

_log = logging.getLogger(__name__)


class Waited(str, Enum):
    """Why the wait ended."""

    ENDED = "ended"
    """A pod contains the result."""
    FINISHED = "finished"
    """The Job has ended, and its pods are gone."""
    GONE = "gone"
    """The Job no longer exists."""
    NOT_STARTED = "not_started"
    OVERDUE = "overdue"
    """The Job is overdue for an unknown reason."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The last observed state of a Job."""

    waited: Waited
    pod: Mapping[str, Any] | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time by this process' monotonic clock."""

    start: float
    over: float


class JobWatch:
    """Watches one Job."""

    def __init__(self, cluster: Cluster, job: Mapping[str, Any], deadlines: Deadlines) -> None:
        self._cluster = cluster
        self._name, self._uid = job["metadata"]["name"], job["metadata"]["uid"]
        self._deadlines = deadlines
        self._begun = False

    async def end(self) -> Sight:
        """Wait until the Job has ended or cannot make progress.

        Raises:
            ClusterError: The cluster refuses the request, or has not answered until long after the Job's deadline.
        """
        pause = FIRST_PAUSE
        while True:
            began, seconds = monotonic(), self._watch_seconds()
            try:
                sight = await self._round(seconds)
            except UnansweredError as error:
                # The run continues in the cluster, so retrying loses nothing.
                if monotonic() > self._deadlines.over:
                    raise
                _log.info("%s; looking again", error)
                sight = None
            if sight is not None:
                return sight
            # A watch that ended early may do so again immediately.
            early = monotonic() - began < min(seconds, _LONGEST_PAUSE)
            pause = min(2 * pause, _LONGEST_PAUSE) if early else FIRST_PAUSE
            if early:
                await asyncio.sleep(pause)

    async def _round(self, seconds: int) -> Sight | None:
        job = await self._cluster.job(self._name)
        if job is None or job["metadata"]["uid"] != self._uid:
            return Sight(Waited.GONE, why="its Job was deleted")
        listed, version = await self._cluster.pods(self._uid)
        pods = {pod["metadata"]["name"]: pod for pod in listed}
        sight = self._seen(job, list(pods.values()))
        if sight is not None:
            return sight
        async with aclosing(self._cluster.watch_pods(self._uid, version, seconds)) as events:
            async for event in events:
                if event["type"] == "DELETED":
                    return None  # decided when the Job is read next
                pods[event["object"]["metadata"]["name"]] = event["object"]
                sight = self._seen(job, list(pods.values()))
                if sight is not None:
                    return sight
        return None

    def _seen(self, job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> Sight | None:
        self._begun = self._begun or has_begun(pods)
        ended, finished = ended_pod(pods), job_end(job)
        if ended is not None:
            return Sight(Waited.ENDED, ended)
        if finished is not None and not pods:
            return Sight(Waited.FINISHED, why=message_of(finished))
        if not self._begun and (is_hopeless(pods) or monotonic() > self._deadlines.start):
            return Sight(Waited.NOT_STARTED, why=why_waiting(pods))
        if monotonic() > self._deadlines.over:
            return Sight(Waited.OVERDUE, why="it has not ended, and the cluster has not ended it")
        return None

    def _watch_seconds(self) -> int:
        """Return the seconds until the next deadline."""
        until = self._deadlines.over if self._begun else self._deadlines.start
        return max(1, min(WATCH_SECONDS, math.ceil(until - monotonic())))
