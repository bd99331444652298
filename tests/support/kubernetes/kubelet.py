"""A fake kubelet that runs the container of a pod as a local process, in a separate folder.

Every image is this Python interpreter. The process is not isolated from the machine, and its limits are not enforced;
tests simulate what a cluster does at a limit.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.kubernetes.objects import Objects, now

LONGEST_MESSAGE = 4096
_VARIABLE = re.compile(r"\$\$|\$\(([A-Za-z0-9_.-]+)\)")


class Kubelet:
    """Runs pods."""

    def __init__(self, objects: Objects, folder: Path) -> None:
        self._objects = objects
        self._folder = folder
        self.trouble: dict[str, dict[str, Any]] = {}
        """Waiting state by image: such a container never runs. The key "" is for pods that cannot be scheduled."""
        self.started: list[str] = []
        """Names of the started pods, in order."""
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._killed: dict[str, str] = {}
        """Reason for which a container was stopped, by pod."""

    def log_of(self, name: str) -> bytes:
        file = self._folder / name / "log"
        return file.read_bytes() if file.exists() else b""

    def has_begun(self, name: str) -> bool:
        return name in self._processes or (self._folder / name).exists()

    async def run(self, pod: dict[str, Any]) -> None:
        """Run the pod to its end, or return immediately if it has to wait."""
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        if "" in self.trouble:
            unscheduled = {"type": "PodScheduled", "status": "False", **self.trouble[""]}
            self._set_status(pod, "Pending", conditions=[unscheduled])
            return
        trouble = self.trouble.get(container["image"])
        waiting = trouble or {"reason": "ContainerCreating"}
        self._set_status(pod, "Pending", {"waiting": waiting}, conditions=[{"type": "PodScheduled", "status": "True"}])
        if trouble is not None:
            return
        begun = now()
        code = await self._run(
            name, container, lambda: self._set_status(pod, "Running", {"running": {"startedAt": begun}})
        )
        self._set_status(pod, "Failed" if code else "Succeeded", {"terminated": self._terminated(name, code, begun)})

    async def end(self, name: str, grace: float, reason: str = "") -> None:
        """Send SIGTERM, and after `grace` seconds SIGKILL to the process and its children."""
        process = self._processes.get(name)
        if process is None:
            return
        self._killed[name] = reason
        try:
            first = psutil.Process(process.pid)
            tree = [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return  # it has ended, and its task does not know yet
        if grace:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace)
        for each in tree:  # all processes of a container end together
            with suppress(psutil.NoSuchProcess):
                each.kill()
        await process.wait()

    async def close(self) -> None:
        for name in list(self._processes):
            await self.end(name, 0)

    def _set_status(
        self,
        pod: dict[str, Any],
        phase: str,
        state: dict[str, Any] | None = None,
        conditions: list[dict[str, Any]] | None = None,
    ) -> None:
        status = pod["status"]
        status["phase"] = phase
        if conditions is not None:
            status["conditions"] = conditions
        if state is not None:
            container = pod["spec"]["containers"][0]
            status["containerStatuses"] = [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "ready": False,
                    "restartCount": 0,
                    "state": state,
                }
            ]
        self._objects.changed("MODIFIED", pod)

    async def _run(self, name: str, container: dict[str, Any], begun: Any) -> int:
        folder = self._folder / name
        (folder / "tmp").mkdir(parents=True)
        environment = {each["name"]: _expanded(each["value"], {}) for each in container.get("env", [])}
        given = [_expanded(text, environment) for text in [*container["command"], *container.get("args", [])]]
        # In a container these files would be mounts: for the report and for the files that the script writes.
        command = [str(folder / "report") if text == container["terminationMessagePath"] else text for text in given]
        assert container["workingDir"] == container["volumeMounts"][0]["mountPath"]
        with (folder / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *[sys.executable if command[0] == "python" else command[0], *command[1:]],
                cwd=folder / "tmp",
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[name] = process
        self.started.append(name)
        begun()
        try:
            code = await process.wait()
        finally:
            del self._processes[name]
        return code if code >= 0 else 128 - code

    def _terminated(self, name: str, code: int, begun: str) -> dict[str, Any]:
        report = self._folder / name / "report"
        message = report.read_text()[:LONGEST_MESSAGE] if report.exists() else ""
        reason = self._killed.get(name) or ("Error" if code else "Completed")
        return {"exitCode": code, "reason": reason, "message": message, "startedAt": begun, "finishedAt": now()}


def _expanded(text: str, environment: dict[str, str]) -> str:
    """Replace `$(NAME)` and `$$` like the kubelet in commands, arguments and values."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return _VARIABLE.sub(replaced, text)
