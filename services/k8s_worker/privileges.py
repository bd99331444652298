"""Restrict the privileges of scripts that run as child processes.  This is not a sandbox; use the Kubernetes runner."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from integr8s_idem.errors import ApplicationError
from services.settings import PlatformSection

_log = logging.getLogger(__name__)

_PR_GET_DUMPABLE: Final = 3
_PR_SET_DUMPABLE: Final = 4


async def prepare_for_scripts(settings: PlatformSection) -> None:
    """Log a warning, and check that scripts of a worker that runs as root can run as an unprivileged user.

    Raises:
        ApplicationError: This process is root, and the user for its scripts cannot run them.
    """
    _log.warning(
        'runner = "subprocess" runs scripts as child processes of this worker. Their memory, time and files are '
        "limited, but they run without a sandbox. Run only scripts that you trust, or set [platform] runner to "
        '"kubernetes"'
    )
    if (user := user_of_scripts(settings)) is not None:
        await _check(settings.interpreter or sys.executable, user)
    elif os.geteuid() == 0:
        _log.warning("[platform] scripts_as_root gives scripts full control of this machine")


def user_of_scripts(settings: PlatformSection) -> int | None:
    """Return the id of the user that runs scripts; `None` for the worker's own user."""
    return settings.subprocess_user_id if os.geteuid() == 0 and not settings.scripts_as_root else None


@contextmanager
def hidden_process() -> Iterator[None]:
    """Hide environment, memory and files of this process from other processes of its user inside the block.

    On Linux, `/proc/PID` then belongs to root.  There are no core dumps, and only root can attach a debugger.
    """
    before = _prctl(_PR_GET_DUMPABLE, 0)
    _prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        _prctl(_PR_SET_DUMPABLE, before)


def _prctl(option: int, value: int) -> int:
    if sys.platform != "linux":
        return 0
    answer = int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0))
    if answer < 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
    return answer


async def _check(interpreter: str, user: int) -> None:
    try:
        trial = await asyncio.create_subprocess_exec(
            *(interpreter, "-I", "-c", ""),
            user=user,
            group=user,
            extra_groups=[],
            cwd="/",
            env={},
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
        )
    except OSError as error:
        raise _cannot_run(interpreter, user, error.strerror or str(error)) from error
    _, said = await trial.communicate()
    if trial.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise _cannot_run(interpreter, user, lines[-1] if lines else f"exit code {trial.returncode}")


def _cannot_run(interpreter: str, user: int, why: str) -> ApplicationError:
    return ApplicationError(
        f"the worker runs as root and its scripts as user {user} ([platform] subprocess_user_id), who cannot run "
        f"{interpreter}: {why}. Run the worker as another user; or set [platform] interpreter to a Python that every "
        "user can run; or, for scripts of your own, set [platform] scripts_as_root = true"
    )
