"""The objects of the fake cluster: Jobs, pods, and the history of pods for watches."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from tests.support.kubernetes.checks import RefusalError

CONTROLLER = "batch.kubernetes.io/controller-uid"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_metadata(given: dict[str, Any], namespace: str, version: int) -> dict[str, Any]:
    return {
        **copy.deepcopy(given),
        "namespace": namespace,
        "uid": str(uuid4()),
        "creationTimestamp": now(),
        "resourceVersion": str(version),
    }


class Objects:
    """The objects of a namespace, in memory."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 100
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._forgotten = 100
        self._changed = asyncio.Event()

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def changed(self, kind: str, pod: dict[str, Any]) -> None:
        """Record a change of a pod: ADDED, MODIFIED or DELETED."""
        pod["metadata"]["resourceVersion"] = str(self.next_version())
        self._history.append((self.version, kind, copy.deepcopy(pod)))
        self._changed.set()
        self._changed = asyncio.Event()

    def forget_history(self) -> None:
        """Delete the history like a compaction of etcd: watches from an earlier version expire."""
        self._history.clear()
        self._forgotten = self.next_version()

    def selected(self, selector: str) -> list[dict[str, Any]]:
        return [copy.deepcopy(pod) for pod in self.pods.values() if matches(pod, selector)]

    def job_of(self, pod: dict[str, Any]) -> dict[str, Any] | None:
        """Return the Job that created the pod, if it still exists."""
        uid = pod["metadata"]["labels"][CONTROLLER]
        return next((job for job in self.jobs.values() if job["metadata"]["uid"] == uid), None)

    async def watch(self, selector: str, since: int, seconds: float) -> AsyncIterator[dict[str, Any]]:
        """Yield events of matching pods after version `since`; end with an error if that version was compacted."""
        until = asyncio.get_running_loop().time() + seconds
        while True:
            if since < self._forgotten:
                yield {
                    "type": "ERROR",
                    "object": RefusalError(410, "Expired", f"too old resource version: {since}").status,
                }
                return
            changed = self._changed
            for version, kind, pod in [entry for entry in self._history if entry[0] > since]:
                since = version
                if matches(pod, selector):
                    yield {"type": kind, "object": pod}
            left = until - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, left))
            except TimeoutError:
                return


def matches(pod: dict[str, Any], selector: str) -> bool:
    wanted: dict[str, str] = dict(part.split("=", 1) for part in selector.split(",") if part)
    return all(pod["metadata"]["labels"].get(label) == value for label, value in wanted.items())
