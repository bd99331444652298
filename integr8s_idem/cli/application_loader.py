"""Find what `MODULE:APP` names, as servers of Python applications do: from the working directory."""

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
"""Lines of an application's traceback that are shown."""
_USAGE: Final = "write MODULE:APP, as in billing.workers:platform"


def load_application(target: str) -> Platform:
    """Import what `target` names.

    Raises:
        ApplicationError: It says what is wrong, and what to do.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ApplicationError(f'"{target}" names no application; {_USAGE}{_guess(target)}')
    if "/" in module_name or module_name.endswith(".py"):
        raise ApplicationError(f'"{target}" is a path; {_USAGE}{_guess(target)}')
    found = _attribute(_module(module_name), attribute)
    if isinstance(found, Platform):
        return found
    raise ApplicationError(
        f"{target} is {_article(type(found).__name__)}, not a Platform; write {attribute} = Platform(Service(…), …)"
    )


def optional_application(target: str | None) -> Platform | None:
    """What `target` names, as `load_application`; `None` if it is not given."""
    return load_application(target) if target else None


def chosen_services(platform: Platform, names: Sequence[str]) -> list[Service]:
    """The services named; all of the platform's if none is.

    Raises:
        ApplicationError: One is no service of the platform.
    """
    known = list(platform.services)
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f' (did you mean "{near[0]}"?)' if near else ""
            raise ApplicationError(f'no service is called "{name}"{hint}; known: {", ".join(known) or "none"}')
    return platform.choose(names)


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ApplicationError(
                f'no module "{error.name}" is found from {here}; run from the folder that holds '
                f'"{name.partition(".")[0]}", or install it'
            ) from None
        raise ApplicationError(_broken(name, error, f'install "{error.name}", or mend the import')) from None
    except (ApplicationError, SettingsError):
        raise  # what the module built does not fit together, and says so itself
    except Exception as error:  # noqa: BLE001 -- whatever an application raises when it is imported is shown
        raise ApplicationError(_broken(name, error, "mend the application and try again")) from None
    except SystemExit:
        raise ApplicationError(
            f'module "{name}" ends the program when it is imported; put that under if __name__ == "__main__"'
        ) from None


def _attribute(module: ModuleType, attribute: str) -> object:
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        applications = [name for name, value in vars(module).items() if isinstance(value, Platform)]
        near = get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")], n=1)
        meant = applications[:1] or near
        hint = f"; perhaps {module.__name__}:{meant[0]} is meant" if meant else "; it holds no Platform"
        raise ApplicationError(f'module "{module.__name__}" has no "{attribute}"{hint}') from None


def _broken(name: str, error: Exception, advice: str) -> str:
    """The last lines of the application's own traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    shown = "".join(lines).rstrip().splitlines()[-_OWN_LINES:]
    return "\n".join([f'module "{name}" cannot be imported:', *(f"    {line}" for line in shown), f"To do: {advice}"])


def _is_own(filename: str) -> bool:
    """Whether a file is the application's: neither Python's, nor installed, nor this one."""
    elsewhere = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), "<frozen", __file__)
    return not filename.startswith(elsewhere)


def _guess(target: str) -> str:
    path, _, attribute = target.partition(":")
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    return f"; perhaps {module}:{attribute or 'platform'} is meant" if module else ""


def _article(word: str) -> str:
    return f"an {word}" if word[:1].lower() in "aeiou" else f"a {word}"
