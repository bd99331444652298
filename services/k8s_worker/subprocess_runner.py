"""Run scripts as child processes, each under its own supervisor (see supervisor.py)."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from services.events import CreatePodCommand, ResourceUsage
from services.k8s_worker.privileges import user_of_scripts
from services.k8s_worker.runner import Run, RunEnd, UnsupportedLanguageError
from services.k8s_worker.supervised import Supervised, supervised
from services.settings import PlatformSection

SUPPORTED: Final = ("python",)

_MIB: Final = 1024 * 1024


class SubprocessRunner:
    """Runs scripts as child processes of this one."""

    def __init__(self, settings: PlatformSection) -> None:
        self._settings = settings

    async def run(self, pod_name: str, command: CreatePodCommand, stop: asyncio.Event) -> Run:
        if command.language not in SUPPORTED:
            raise UnsupportedLanguageError(command.language, SUPPORTED)
        # The supervisor removes the folder, even if this process is killed.
        with tempfile.TemporaryDirectory(
            prefix=f"{pod_name}-", dir=self._settings.work_folder, ignore_cleanup_errors=True
        ) as folder:
            script = Path(folder) / "main.py"
            script.write_text(command.script, encoding="utf-8")
            if (user := user_of_scripts(self._settings)) is not None:
                for path in (script, folder):
                    os.chown(path, user, user)
            spec = self._spec(folder, command)
            keep, flood = self._settings.output_limit_bytes, self._settings.output_flood_bytes
            async with supervised(spec, keep=keep, flood=flood) as running:
                return await self._watch(running, command.timeout_seconds, stop)

    async def discard(self, pod_name: str) -> None:
        """Do nothing, since runs leave nothing behind."""

    def _spec(self, folder: str, command: CreatePodCommand) -> dict[str, Any]:
        settings = self._settings
        interpreter = settings.interpreter or sys.executable
        # One second more, so that a script that uses a whole core reaches the time limit first.
        cpu_seconds = math.ceil(command.cpu_limit * command.timeout_seconds) + 1
        return {
            "folder": folder,
            "user": user_of_scripts(settings),
            "command": [interpreter, "-I", "-u", "-X", "utf8", "main.py"],
            "limits": {
                "RLIMIT_AS": (command.memory_limit_mb or settings.default_memory_mb) * _MIB,
                "RLIMIT_CPU": cpu_seconds,
                "RLIMIT_FSIZE": settings.file_limit_bytes,
                "RLIMIT_NOFILE": settings.max_open_files,
                "RLIMIT_CORE": 0,
            },
        }

    async def _watch(self, script: Supervised, timeout: float, stop: asyncio.Event) -> Run:
        end = await _first(script, timeout, stop)
        await script.end()
        stdout, stderr = script.stdout.text(), script.stderr.text()
        report = script.report()
        if report is None:
            return Run(RunEnd.LOST, -signal.SIGKILL, stdout, stderr)
        exit_code = report.pop("exit_code")
        return Run(end, exit_code, stdout, stderr, ResourceUsage.model_validate(report))


async def _first(script: Supervised, timeout: float, stop: asyncio.Event) -> RunEnd:
    """Wait for the first event that ends the run, and return its reason."""
    reasons = {
        asyncio.ensure_future(script.wait()): RunEnd.EXITED,
        asyncio.ensure_future(stop.wait()): RunEnd.STOPPED,
        asyncio.ensure_future(script.flooded.wait()): RunEnd.FLOODED,
    }
    try:
        done, _ = await asyncio.wait(reasons, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for waiting in reasons:
            waiting.cancel()
    return next((end for waiting, end in reasons.items() if waiting in done), RunEnd.TIMED_OUT)
