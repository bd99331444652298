"""Run scripts as Jobs of a Kubernetes cluster.

A Job is named after the pod, whose name is derived from the idempotency key: a rerun tries to create the same Job,
finds that it exists, and continues with it.  See docs/decisions/0054-jobs-named-after-the-key.md.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http import HTTPStatus
from time import monotonic
from typing import Any, Final

from integr8s_idem.errors import PermanentError
from services.events import CreatePodCommand
from services.k8s_worker.cluster import Cluster, ClusterError, RefusedError, UnansweredError
from services.k8s_worker.connection import connected
from services.k8s_worker.job_spec import CONTAINER, belongs_to_platform, deadline_seconds, job_of, runs_the_same
from services.k8s_worker.pod_status import (
    Object,
    ended_pod,
    has_begun,
    has_output,
    is_past_its_deadline,
    run_of,
    stdout_of,
)
from services.k8s_worker.pod_watch import Deadlines, JobWatch, Sight, Waited
from services.k8s_worker.runner import NoCapacityError, Run, RunEnd
from services.settings import PlatformSection

OVERDUE_SECONDS: Final = 60.0
"""How long a Job may keep running after its own deadline."""
GOING_SECONDS: Final = 30.0
"""How long the pods of a deleted Job may take to end; after that, their node is considered unreachable."""
LOG_SLACK_BYTES: Final = 1_024
"""Bytes to read beyond the kept output, to detect more; the cluster's limit is approximate."""

_KILLED: Final = -signal.SIGKILL
_NEVER: Final = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)
"""The same Job would be refused again."""

_log = logging.getLogger(__name__)


class KubernetesRunner:
    """Runs scripts as Jobs of a cluster."""

    def __init__(self, cluster: Cluster, settings: PlatformSection) -> None:
        self._cluster = cluster
        self._settings = settings

    async def run(self, pod_name: str, command: CreatePodCommand, stop: asyncio.Event) -> Run:
        job = await self._made_or_found(job_of(pod_name, command, self._settings))
        start = monotonic() + self._settings.kubernetes.start_seconds
        over = monotonic() + deadline_seconds(command, self._settings) + OVERDUE_SECONDS
        watching = asyncio.ensure_future(JobWatch(self._cluster, job, Deadlines(start, over)).end())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((watching, stopping), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                return await self._collected(job, watching.result())
        finally:
            for waiting in (watching, stopping):
                waiting.cancel()
            await asyncio.gather(watching, stopping, return_exceptions=True)
        return await self._stopped(job)

    async def discard(self, pod_name: str) -> None:
        job = await self._cluster.job(pod_name)
        if job is not None and belongs_to_platform(job):
            await self._cluster.delete_job(job, pods_first=False)

    async def _made_or_found(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Create the Job, or find it, and return it.

        Raises:
            PermanentError: The cluster refuses the Job, or another Job has its name.
            NoCapacityError: The cluster has no room for the Job, or accepts no requests.
            ClusterError: The Job may exist or not; retry to find out.
        """
        name = wanted["metadata"]["name"]
        try:
            return await self._cluster.create_job(wanted)
        except RefusedError as error:
            if error.status in _NEVER:
                raise PermanentError(str(error)) from error
            if error.exceeds_quota:
                raise NoCapacityError(str(error)) from error
            if error.reason != "AlreadyExists":
                raise
        except UnansweredError as error:
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                raise NoCapacityError(str(error)) from error
            raise
        found = await self._cluster.job(name)
        if found is None:
            raise ClusterError(f"Job {name} existed and is gone")
        if not runs_the_same(found, wanted):
            raise PermanentError(f"Job {name} already exists for another command and was not changed")
        _log.info("Job %s already exists: continuing with it", name)
        return found

    async def _collected(self, job: Object, sight: Sight) -> Run:
        if sight.pod is not None:
            return await self._ended(job, sight.pod)
        if sight.waited in (Waited.NOT_STARTED, Waited.OVERDUE):
            await self._remove(job)
        if sight.waited is Waited.NOT_STARTED:
            return Run(RunEnd.NOT_STARTED, _KILLED, stderr=sight.why)
        if sight.waited is Waited.FINISHED and await self._is_past_its_deadline(job):
            return Run(RunEnd.TIMED_OUT, _KILLED, stderr=sight.why)
        return Run(RunEnd.LOST, _KILLED, stderr=sight.why)

    async def _ended(self, job: Object, pod: Object) -> Run:
        """Return the result of an ended pod."""
        log = await self._output(pod) if has_output(pod) else b""
        if log is None:
            return Run(RunEnd.LOST, _KILLED, stderr="its pod was deleted before its output was read")
        run = run_of(pod, log, self._settings.output_limit_bytes)
        if run.end is RunEnd.LOST and await self._is_past_its_deadline(job):
            return replace(run, end=RunEnd.TIMED_OUT)
        return run

    async def _stopped(self, job: Object) -> Run:
        """End the Job on request, and return its output so far."""
        pods, _ = await self._cluster.pods(job["metadata"]["uid"])
        ended = ended_pod(pods)
        if ended is not None:
            return await self._ended(job, ended)
        logs = [await self._output(pod) for pod in pods if has_begun([pod])]
        stdout = stdout_of(next((log for log in logs if log), b""), self._settings.output_limit_bytes)
        await self._remove(job)
        return Run(RunEnd.STOPPED, _KILLED, stdout)

    async def _output(self, pod: Object) -> bytes | None:
        most = self._settings.output_limit_bytes + LOG_SLACK_BYTES
        return await self._cluster.log(pod["metadata"]["name"], CONTAINER, most)

    async def _remove(self, job: Object) -> None:
        """Delete the Job, and wait until its pods have ended."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        await self._cluster.delete_job(job, pods_first=True)
        until, pause = monotonic() + GOING_SECONDS, 0.1
        while monotonic() < until:
            there = await self._cluster.job(name)
            if there is None or there["metadata"]["uid"] != uid:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)
        _log.warning("Job %s is deleted but its pod has not ended: its node may be unreachable", name)

    async def _is_past_its_deadline(self, job: Object) -> bool:
        there = await self._cluster.job(job["metadata"]["name"])
        return there is not None and is_past_its_deadline(there)


@asynccontextmanager
async def kubernetes_runner(settings: PlatformSection) -> AsyncIterator[KubernetesRunner]:
    """Open a runner for the cluster of the settings.

    Raises:
        SettingsError: The settings do not name a usable cluster.
    """
    async with connected(settings.kubernetes) as api:
        yield KubernetesRunner(Cluster(api, settings.kubernetes), settings)
