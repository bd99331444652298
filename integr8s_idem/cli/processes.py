"""`integr8s-idem run --processes`: several worker processes under a supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from integr8s_idem.cli.run_command import Run, grace_seconds, in_loop, start_logging, warn
from integr8s_idem.config import MemoryStoreSettings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.runtime.supervisor import Supervisor
from integr8s_idem.runtime.supervisor_link import SupervisorLink
from integr8s_idem.runtime.worker_process import Launch

MOST_PROCESSES: Final = 256

_UNKNOWN_GRACE: Final = 60.0
"""Grace period in seconds until the settings are loaded."""

Processes = Annotated[
    str,
    typer.Option(
        metavar="N",
        help="Run N worker processes, or one for each usable processor with auto.  [default: 1, without a supervisor]",
        show_default=False,
    ),
]
WorkerProcessOption = Annotated[
    str | None, typer.Option("--worker-process", metavar="NUMBER:FD", help="Set by the supervisor.", hidden=True)
]


def process_count(text: str) -> int:
    """Return the number of worker processes that the option `--processes` asks for.

    Raises:
        ApplicationError: It is not a number from 1 to `MOST_PROCESSES` or `auto`.
    """
    if text == "auto":
        return min(usable_processors(), MOST_PROCESSES)
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_PROCESSES:
        return int(text)
    raise ApplicationError(f"invalid --processes {text!r}: write a number from 1 to {MOST_PROCESSES}, or auto")


def usable_processors() -> int:
    """Return the number of processors that this process may use, regardless of a container's limit on CPU time."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def worker_launch() -> Launch:
    """Return how to start workers: by the same program, in the same folder and environment, as this process."""
    own = len(sys.argv) - 1
    is_own_command = sys.argv[1:2] == ["run"]
    program = sys.orig_argv[1 : len(sys.orig_argv) - own] if is_own_command else ["-m", "integr8s_idem"]
    return Launch([sys.executable, *program, "run"], Path.cwd(), dict(os.environ))


def supervisor_link(text: str) -> SupervisorLink:
    """Return the link of this worker process to its supervisor, started.

    Raises:
        ApplicationError: The option was not set by a supervisor.
    """
    number, _, fd = text.partition(":")
    try:
        link = SupervisorLink(int(number), int(fd), grace_seconds=_UNKNOWN_GRACE)
    except (ValueError, OSError) as error:
        raise ApplicationError("--worker-process is set by the supervisor; use --processes N") from error
    link.start()
    return link


def supervise(options: Run, number: int, launch: Launch) -> int:
    """Run `number` worker processes until a signal, and return the exit status.

    Raises:
        SettingsError: The settings are invalid.  Nothing has been started.
        ApplicationError: The services cannot run in several processes.
    """
    if sys.platform == "win32":
        raise ApplicationError("--processes is not supported on Windows; start the command several times instead")
    if options.embedded:
        raise ApplicationError(
            "--embedded starts a Kafka and a Redis for one process; run without --processes, or on real servers"
        )
    settings = options.settings()
    if isinstance(settings.store, MemoryStoreSettings):
        raise ApplicationError(
            '[store] kind = "memory" keeps the records of each process apart, so that duplicates would be handled; '
            "run without --processes, or choose another store"
        )
    start_logging(settings, options.log)
    warn(options, settings)
    grace = grace_seconds(settings, options.services)
    names = [service.name for service in options.services]
    return in_loop(_run(Supervisor(launch, number, names, settings.telemetry, grace_seconds=grace)))


async def _run(supervisor: Supervisor) -> int:
    return await supervisor.run()
