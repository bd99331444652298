"""Foreign text inside our own messages: short, in one line, and nothing that a terminal would obey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from integr8s_idem._util.escaping import shown
from integr8s_idem.errors import SettingsMistake

_LONGEST_PATH: Final = 200
_LONGEST_MESSAGE: Final = 2_000
_EXTRAS: Final[Mapping[str, str]] = {"dynamodb": "dynamodb", "mysql": "mysql", "postgresql": "sql", "sqlite": "sql"}
"""What brings the driver of a kind of store."""
_DRIVERS: Final[Mapping[str, Sequence[str]]] = {
    "dynamodb": ("aiobotocore",),
    "mysql": ("sqlalchemy", "aiomysql"),
    "postgresql": ("sqlalchemy", "asyncpg"),
    "sqlite": ("sqlalchemy", "aiosqlite"),
}
"""Modules that a kind of store imports."""


def missing_extra(kind: str) -> str | None:
    """Which module a store of `kind` lacks in this environment, and how to get it; `None` if none."""
    missing = next((module for module in _DRIVERS.get(kind, ()) if find_spec(module) is None), None)
    return f"needs {missing}; {installing(_EXTRAS[kind])}" if missing else None


def said(path: str, message: str) -> SettingsMistake:
    """A mistake whose path and message hold whatever a file or the environment held."""
    return SettingsMistake(shown(path, _LONGEST_PATH), shown(message, _LONGEST_MESSAGE))


def installing(extra: str) -> str:
    """How to install an extra.  In a checkout, and after the installation of a wheel, pip adds it to what is there."""
    return f'install the extra {extra}: pip install "integr8s-idem[{extra}]"'


def lacking(module: str, extra: str, error: ModuleNotFoundError) -> str:
    """That `module` lacks what `error` names, and which extra brings it."""
    return f"{module} needs {error.name}; {installing(extra)}"


def needing(kind: str, error: ModuleNotFoundError) -> str:
    """That a store of `kind` lacks what `error` names, and how to get it."""
    return f'a store of kind "{kind}" needs {error.name}; {installing(_EXTRAS.get(kind, "all"))}'


def text_of(error: BaseException) -> str:
    """What `error` says of itself, whatever that text's code does."""
    try:
        return str(error)
    except Exception as fault:  # noqa: BLE001  # see above
        return f"(it has no text: {type(fault).__name__})"


def shown_number(number: float) -> str:
    """`number` as JSON writes it; a whole one of more digits than anybody reads by its size."""
    if isinstance(number, int) and number.bit_length() > 100:
        return f"one of {number.bit_length()} bits"
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(repr(number), repr(number))
