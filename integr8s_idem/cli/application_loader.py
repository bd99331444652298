"""Load the platform named by `MODULE:APP`, relative to the working directory, as WSGI and ASGI servers do."""

from __future__ import annotations

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Final

from integr8s_idem.errors import ApplicationError, SettingsError
from integr8s_idem.runtime import Platform, Service

_OWN_LINES: Final = 12
"""Number of lines that are shown of an application's traceback."""
_USAGE: Final = "write MODULE:APP, as in billing.workers:platform"


def load_application(target: str) -> Platform:
    """Import the platform named by `target`.

    Raises:
        ApplicationError: `target` is invalid, or its module cannot be imported.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ApplicationError(f'invalid application "{target}"; {_USAGE}{_guess(target)}')
    if "/" in module_name or module_name.endswith(".py"):
        raise ApplicationError(f'"{target}" is a path, not a module; {_USAGE}{_guess(target)}')
    found = _attribute(_module(module_name), attribute)
    if isinstance(found, Platform):
        return found
    raise ApplicationError(
        f"{target} is {_article(type(found).__name__)}, not a Platform; write {attribute} = Platform(Service(…), …)"
    )


def optional_application(target: str | None) -> Platform | None:
    """Load `target`, or return `None` if it is not given."""
    return load_application(target) if target is not None else None


def select_services(platform: Platform, names: Sequence[str]) -> list[Service]:
    """Return the named services of the platform, or all of them without names.

    Raises:
        ApplicationError: The platform has no service of that name.
    """
    known = list(platform.services)
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise ApplicationError(f'unknown service "{name}"{hint}; known services: {", ".join(known) or "none"}')
    return platform.choose(names)


def import_from_here() -> str:
    """Let modules in the working directory be imported, and return that folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return here


def _module(name: str) -> ModuleType:
    here = import_from_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ApplicationError(
                f'module "{error.name}" not found from {here}; run from the folder that contains '
                f'"{name.partition(".")[0]}", or install it'
            ) from None
        raise ApplicationError(_import_failure(name, error, f'install "{error.name}", or fix the import')) from None
    except (ApplicationError, SettingsError):
        raise  # the message is complete without a traceback
    except Exception as error:  # noqa: BLE001 -- an import can raise anything
        raise ApplicationError(_import_failure(name, error, "fix the application and try again")) from None
    except SystemExit:
        raise ApplicationError(
            f'module "{name}" exits when it is imported; move that code under if __name__ == "__main__"'
        ) from None


def _attribute(module: ModuleType, attribute: str) -> object:
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        applications = [name for name, value in vars(module).items() if isinstance(value, Platform)]
        near = get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")], n=1)
        meant = applications[:1] or near
        hint = f"; did you mean {module.__name__}:{meant[0]}?" if meant else "; it does not contain a Platform"
        raise ApplicationError(f'module "{module.__name__}" has no "{attribute}"{hint}') from None


def _import_failure(name: str, error: Exception, advice: str) -> str:
    """Return a message with the last lines of the application's own traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    shown = "".join(lines).rstrip().splitlines()[-_OWN_LINES:]
    return "\n".join([f'module "{name}" cannot be imported:', *(f"    {line}" for line in shown), f"To do: {advice}"])


def _is_own(filename: str) -> bool:
    """Return whether a file belongs to the application, not to Python, an installed package or this module."""
    elsewhere = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen", __file__)
    return not filename.startswith(elsewhere)


def _guess(target: str) -> str:
    path, _, attribute = target.partition(":")
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    return f"; did you mean {module}:{attribute or 'platform'}?" if module else ""


def _article(word: str) -> str:
    return f"an {word}" if word[:1].lower() in "aeiou" else f"a {word}"
