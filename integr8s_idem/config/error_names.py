"""Find the class of an exception by its name in the settings."""

from __future__ import annotations

import builtins
import importlib
import sys
from difflib import get_close_matches
from importlib.metadata import packages_distributions
from types import ModuleType


def error_class(name: str) -> type[Exception]:
    """Return the exception with this dotted name, or the built-in one with a name without dots.

    The module of the exception is imported.

    Raises:
        ValueError: There is no such class of exceptions, or its module cannot be imported.
    """
    module, attributes = _module(name)
    found: object = module
    for attribute in attributes:
        inner = getattr(found, attribute, None)
        if inner is None:
            raise ValueError(f'= "{name}" does not exist{_suggestion(name, found, attribute)}')
        found = inner
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise ValueError(f'= "{name}" is not a class of exceptions; name a subclass of Exception')
    return found


def _module(name: str) -> tuple[ModuleType, list[str]]:
    """Return the longest part of `name` that is a module, and the rest."""
    parts = name.split(".")
    if len(parts) == 1:
        return builtins, parts
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            return importlib.import_module(module), parts[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise ValueError(f'= "{name}" cannot be imported: {error}; install the missing module') from None
        except Exception as error:  # noqa: BLE001  # an import can raise anything
            raise ValueError(f'= "{name}" cannot be imported: {type(error).__name__}: {error}') from None
    near = get_close_matches(parts[0], [*packages_distributions(), *sys.stdlib_module_names], n=1)
    if near and near[0] != parts[0]:
        raise ValueError(f'= "{name}" does not exist; did you mean {".".join([near[0], *parts[1:]])}?')
    raise ValueError(f'= "{name}" does not exist: module "{parts[0]}" not found; install it, or fix the name')


def _suggestion(name: str, found: object, attribute: str) -> str:
    errors = [
        each for each, value in vars(found).items() if isinstance(value, type) and issubclass(value, BaseException)
    ]
    near = get_close_matches(attribute, errors, n=1)
    return f"; did you mean {name.removesuffix(attribute)}{near[0]}?" if near else ""
