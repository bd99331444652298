"""The native code of the distribution integr8s-idem-speedups, which is used if it is installed.

Python code defines what the library does.  Native code takes over the common case, and returns to Python for
everything else, so that errors and unusual values are handled in one place.  Modules read `native` for each batch or
object, so that tests can compare both.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final, NamedTuple

DISTRIBUTION: Final = "integr8s-idem-speedups"
MODULE: Final = "integr8s_idem_speedups"
INTERFACE: Final = 6
"""The interface of the module that this version uses."""
VARIABLE: Final = "INTEGR8S_IDEM_SPEEDUPS"
"""Environment variable that disables the native code if it is one of `_OFF`."""
_OFF: Final = frozenset({"off", "false", "no", "0"})
_ON: Final = frozenset({"", "on", "true", "yes", "1"})
_REINSTALL: Final = f"install the version of {DISTRIBUTION} that belongs to this version of integr8s-idem, or remove it"


class Speedups(NamedTuple):
    """The native code, or why there is none."""

    native: Any | None
    """The module."""
    description: str
    """Whether it is used, for people."""
    problem: str = ""
    """Why the module is not used although nobody disabled it; empty if it is used, disabled or not installed."""
    remedy: str = ""
    """What to do about the problem."""


def load() -> Speedups:
    """Import the module unless it is disabled."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() in _OFF:
        return Speedups(None, f"not used: {VARIABLE}={given}")
    if given.lower() not in _ON:
        # A user who sets it probably wants to disable the native code.
        problem = f"{VARIABLE} is {given!r}, which is neither on nor off"
        return _unusable(problem, f"set {VARIABLE} to on or off, or remove it")
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if error.name == MODULE:
            return Speedups(None, f"not used: {DISTRIBUTION} is not installed")
        return _unusable(str(error))
    except ImportError as error:  # built for another platform
        return _unusable(str(error))
    found = getattr(module, "INTERFACE", None)
    if found != INTERFACE:
        return _unusable(f"it has interface {found}, but this version of integr8s-idem needs {INTERFACE}")
    return Speedups(module, f"used ({DISTRIBUTION} {module.__version__})")


def _unusable(problem: str, remedy: str = _REINSTALL) -> Speedups:
    return Speedups(None, f"not used: {DISTRIBUTION} cannot be used", problem, remedy)


LOADED: Final = load()
native: Any | None = LOADED.native
"""The module, or `None` if Python code is used."""
