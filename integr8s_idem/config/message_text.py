"""Text from outside in messages: shortened, on one line, without control characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from integr8s_idem._util.escaping import shown
from integr8s_idem.errors import SettingsMistake

_LONGEST_PATH: Final = 200
_LONGEST_MESSAGE: Final = 2_000
_EXTRAS: Final[Mapping[str, str]] = {"dynamodb": "dynamodb", "mysql": "mysql", "postgresql": "sql", "sqlite": "sql"}
"""The extra that installs the driver of a kind of store."""
_DRIVERS: Final[Mapping[str, Sequence[str]]] = {
    "dynamodb": ("aiobotocore",),
    "mysql": ("sqlalchemy", "aiomysql"),
    "postgresql": ("sqlalchemy", "asyncpg"),
    "sqlite": ("sqlalchemy", "aiosqlite"),
}
"""The modules that a kind of store imports."""


def missing_extra(kind: str) -> str | None:
    """Return which module is missing for a store of `kind` and how to install it; `None` if none is missing."""
    missing = next((module for module in _DRIVERS.get(kind, ()) if find_spec(module) is None), None)
    return f"needs {missing}; {installing(_EXTRAS[kind])}" if missing else None


def printable_mistake(path: str, message: str) -> SettingsMistake:
    """Create a mistake whose path and message contain text from a file or the environment."""
    return SettingsMistake(shown(path, _LONGEST_PATH), shown(message, _LONGEST_MESSAGE))


def installing(extra: str) -> str:
    """Return how to install an extra, in a checkout or after installation of the wheel."""
    return f'install the extra {extra}: pip install "integr8s-idem[{extra}]"'


def lacking(module: str, extra: str, error: ModuleNotFoundError) -> str:
    """Return the message for a missing dependency of `module`, with the extra that installs it."""
    return f"{module} needs {error.name}; {installing(extra)}"


def needing(kind: str, error: ModuleNotFoundError) -> str:
    """Return the message for a missing dependency of a store of `kind`, with the extra that installs it."""
    return f'a store of kind "{kind}" needs {error.name}; {installing(_EXTRAS.get(kind, "all"))}'


def text_of(error: BaseException) -> str:
    """Return the text of `error`, even if its `__str__` raises, or panics in an extension module."""
    try:
        return str(error)
    except KeyboardInterrupt:  # from a signal, not from `__str__`
        raise
    except BaseException as fault:  # noqa: BLE001  # it would stop the service that reports another error
        return f"(its text is not available: {type(fault).__name__})"


def shown_number(number: float) -> str:
    """Return `number` as in JSON, or the size of a very large integer."""
    if isinstance(number, int) and number.bit_length() > 100:
        return f"a {number.bit_length()}-bit number"
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(repr(number), repr(number))
