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
    LOST = "lost"
    """Whoever watched the script has died, and the script with it."""


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

        Cancelled, it leaves no process and no file behind.

        Args:
            stop: Set by others when the run is to be ended.

        Raises:
            UnsupportedLanguageError: Nothing was run.
            OSError: Nothing was run; it may work later.
        """
        ...
