"""What runs a pod's script, whatever it is made of."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from services.events import CreatePodCommand, ResourceUsage


class RunEnd(str, Enum):
    """Why a run is over."""

    EXITED = "exited"
    """The script ended by itself, or by a limit of the system."""
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"
    """Somebody asked for the pod to be deleted."""
    FLOODED = "flooded"
    """It wrote more than anybody wants to read."""
    OUT_OF_MEMORY = "out_of_memory"
    """The system ended it: it wanted more memory than it may have."""
    EVICTED = "evicted"
    """The cluster took its node or its place away."""
    NOT_STARTED = "not_started"
    """It did not begin to run, and will not."""
    LOST = "lost"
    """Whoever watched the script has died, and the script with it, or what it left is gone."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a script ran."""

    end: RunEnd
    exit_code: int = 0
    """Negative: the number of the signal that ended it."""
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
        return f"scripts in {self.language} cannot be run here; supported: {', '.join(self.supported)}"


class Runner(Protocol):
    """Runs scripts."""

    async def run(self, pod_name: str, command: CreatePodCommand, stop: asyncio.Event) -> Run:
        """Run the command's script within its limits.

        A later run of the same pod and command, in this process or another, goes on with what an earlier one has left,
        if anything.  Cancelled, a run leaves nothing behind but what such a later run would find.

        Args:
            stop: Set by others when the run is to be ended.

        Raises:
            UnsupportedLanguageError: Nothing was run.
            PermanentError: Nothing was run, and trying again would not help.
            OSError: How it ended is not known; asked again, it goes on, or begins if it had not begun.
        """
        ...

    async def discard(self, pod_name: str) -> None:
        """Remove what is left of a pod whose outcome is kept; end it if it runs.  Nothing left is fine.

        Raises:
            OSError: It may still be there.
        """
        ...
