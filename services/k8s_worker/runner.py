"""The interface of runners, which run the scripts of pods."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from services.events import CreatePodCommand, ResourceUsage


class RunEnd(str, Enum):
    """Why a run ended."""

    EXITED = "exited"
    """The script exited, or was killed by a system limit."""
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"
    """Deletion of the pod was requested."""
    FLOODED = "flooded"
    """The script exceeded the output limit."""
    OUT_OF_MEMORY = "out_of_memory"
    """The script exceeded the memory limit."""
    EVICTED = "evicted"
    """The cluster evicted the pod."""
    NOT_STARTED = "not_started"
    """The script could not be started."""
    LOST = "lost"
    """The supervisor died with the script, or the script's output is gone."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run."""

    end: RunEnd
    exit_code: int = 0
    """Exit code; the negative number of the signal that killed the script."""
    stdout: str = ""
    stderr: str = ""
    usage: ResourceUsage = field(default_factory=ResourceUsage)


class UnsupportedLanguageError(Exception):
    """This runner cannot run scripts in that language."""

    def __init__(self, language: str, supported: tuple[str, ...]) -> None:
        super().__init__(language, supported)
        self.language = language
        self.supported = supported

    def __str__(self) -> str:
        return f"unsupported language {self.language}; supported: {', '.join(self.supported)}"


class NoCapacityError(OSError):
    """There is no room for the run now.  A later attempt starts it, or continues it if it has started after all."""


class Runner(Protocol):
    """Runs scripts."""

    async def run(self, pod_name: str, command: CreatePodCommand, stop: asyncio.Event) -> Run:
        """Run the command's script within its limits.

        A later run of the same pod and command, in this process or another, continues an earlier one if that has left
        anything.  A cancelled run leaves behind only what such a later run finds.

        Args:
            stop: Set to end the run.

        Raises:
            UnsupportedLanguageError: The script was not run.
            PermanentError: The script was not run, and a retry would fail as well.
            NoCapacityError: There is no room for it now.
            OSError: The outcome is unknown; a retry continues or starts the run.
        """
        ...

    async def discard(self, pod_name: str) -> None:
        """Remove the remains of a pod whose outcome is stored, and end it if it runs.  Idempotent.

        Raises:
            OSError: The pod may still exist.
        """
        ...
