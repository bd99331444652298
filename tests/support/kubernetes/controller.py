"""A fake Job controller: creates pods, reports the status of Jobs, and deletes objects."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.support.kubernetes.kubelet import Kubelet
from tests.support.kubernetes.objects import CONTROLLER, Objects, new_metadata, now


class Controller:
    """Runs Jobs with one pod each."""

    def __init__(self, objects: Objects, kubelet: Kubelet) -> None:
        self._objects = objects
        self._kubelet = kubelet
        self._tasks: set[asyncio.Task[None]] = set()
        self.makes_pods = True
        """Set to `False` to simulate a quota that prevents pods, which a cluster only reports as events."""

    def made(self, job: dict[str, Any]) -> None:
        """Run a new Job."""
        self._begin(self._run(job))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def delete(self, job: dict[str, Any], policy: str) -> None:
        """Delete a Job in the background, after the API has answered."""
        if policy == "Foreground":
            job["metadata"]["deletionTimestamp"] = now()
        else:
            self._objects.jobs.pop(job["metadata"]["name"], None)
        if policy != "Orphan":
            self._begin(self._delete(job))

    async def delete_pod(self, pod: dict[str, Any]) -> None:
        """Stop a pod and delete it with its output."""
        if pod["metadata"]["name"] not in self._objects.pods:
            return
        pod["metadata"]["deletionTimestamp"] = now()
        self._objects.changed("MODIFIED", pod)
        await self._kubelet.end(pod["metadata"]["name"], pod["spec"]["terminationGracePeriodSeconds"])
        await asyncio.sleep(0.05)  # so that the kubelet reports its end first
        if self._objects.pods.pop(pod["metadata"]["name"], None) is not None:
            self._objects.changed("DELETED", pod)

    async def evict(self, pod: dict[str, Any], message: str) -> None:
        """Evict a pod like a node under resource pressure: the pod remains and has failed."""
        pod["status"] |= {"reason": "Evicted", "message": message}
        pod["status"]["conditions"].append(
            {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": message}
        )
        await self._kubelet.end(pod["metadata"]["name"], pod["spec"]["terminationGracePeriodSeconds"])

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, job: dict[str, Any]) -> None:
        if not self.makes_pods:
            return
        pod = self._new_pod(job)
        self._begin(self._keep_deadline(job, job["spec"]["activeDeadlineSeconds"]))
        await self._kubelet.run(pod)
        if pod["status"]["phase"] in ("Succeeded", "Failed"):
            self._finish(job, pod)

    def _new_pod(self, job: dict[str, Any]) -> dict[str, Any]:
        template, owner = job["spec"]["template"], job["metadata"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": new_metadata(template["metadata"], owner["namespace"], self._objects.next_version()),
            "spec": template["spec"],
            "status": {"phase": "Pending", "conditions": []},
        }
        pod["metadata"]["name"] = f"{owner['name']}-{random.randbytes(3).hex()}"
        pod["metadata"]["labels"] |= {CONTROLLER: owner["uid"], "batch.kubernetes.io/job-name": owner["name"]}
        self._objects.pods[pod["metadata"]["name"]] = pod
        job["status"]["active"] = 1
        self._objects.changed("ADDED", pod)
        return pod

    def _finish(self, job: dict[str, Any], pod: dict[str, Any]) -> None:
        ok = pod["status"]["phase"] == "Succeeded"
        disrupted = any(each["type"] == "DisruptionTarget" for each in pod["status"]["conditions"])
        reason = "CompletionsReached" if ok else "PodFailurePolicy" if disrupted else "BackoffLimitExceeded"
        self._end(job, "Complete" if ok else "Failed", reason)

    def _end(self, job: dict[str, Any], kind: str, reason: str) -> None:
        if not job["status"].get("conditions"):
            job["status"]["active"] = 0
            job["status"]["conditions"] = [
                {"type": kind, "status": "True", "reason": reason, "message": f"as {reason}"}
            ]
            self._begin(self._expire(job, job["spec"]["ttlSecondsAfterFinished"]))

    async def _keep_deadline(self, job: dict[str, Any], seconds: float) -> None:
        await asyncio.sleep(seconds)
        if not job["status"].get("conditions"):
            self._end(job, "Failed", "DeadlineExceeded")
            await self._delete_pods(job)

    async def _expire(self, job: dict[str, Any], seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.delete(job, "Background")

    async def _delete(self, job: dict[str, Any]) -> None:
        await self._delete_pods(job)
        if self._objects.jobs.get(job["metadata"]["name"]) is job:
            del self._objects.jobs[job["metadata"]["name"]]

    async def _delete_pods(self, job: dict[str, Any]) -> None:
        for pod in list(self._objects.pods.values()):
            if pod["metadata"]["labels"][CONTROLLER] == job["metadata"]["uid"]:
                await self.delete_pod(pod)
