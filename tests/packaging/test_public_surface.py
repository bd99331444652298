"""The names that users may import are a list, and documentation and examples import no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from tests.packaging import reference
from tests.packaging.repository import ROOT, code_blocks, files, name_of

LIST = Path(__file__).with_name("public_names.txt")
EXAMPLES = ("examples/", "providers/", "services/")
"""Folders whose modules show users how to write their own."""
DEMO = "examples/demo/"
"""It starts servers and breaks things, as tests do."""


@cache
def public_names() -> frozenset[str]:
    """Each public name with each module that it can be imported from."""
    modules = {module for page in reference.PAGES.values() for module in page} | {"errors"}
    return frozenset(
        f"{reference.PACKAGE}.{module}.{name}".replace("..", ".")
        for module in modules
        for name in reference.exports(module) | {thing.name for thing in reference.public(module)}
    )


def imported_names(source: str) -> Iterator[str]:
    """The names of the package that Python code imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == reference.PACKAGE:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python_of(file: Path) -> Iterator[str]:
    """The Python code of a page, or of a module."""
    text = file.read_text(encoding="utf-8")
    return map(dedent, code_blocks(text, "python") if file.suffix == ".md" else [text])


def shown_files() -> list[Path]:
    pages = [
        page
        for page in files(".md")
        if not name_of(page).startswith(("docs/decisions/", "docs/reference/api/", "tests/"))
    ]
    return pages + [file for file in files(".py") if _is_example(name_of(file))]


def _is_example(name: str) -> bool:
    return name.startswith(EXAMPLES) and not name.startswith(DEMO)


def test_the_public_names_are_those_of_the_list() -> None:
    listed = set(LIST.read_text(encoding="utf-8").split())

    assert listed - public_names() == set(), f"no longer public: a breaking change; adapt {LIST.name} and CHANGELOG.md"
    assert public_names() - listed == set(), f"newly public: add them to {LIST.name} if that is intended"


@pytest.mark.parametrize("file", shown_files(), ids=name_of)
def test_documentation_and_examples_import_public_names_alone(file: Path) -> None:
    found = {name for code in python_of(file) for name in imported_names(code)}

    assert {name for name in found - public_names() if not _is_module(name)} == set()


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_an_import_of_a_private_name_is_found() -> None:
    found = list(imported_names("from integr8s_idem.engine.run import Run\nimport os\n"))

    assert found == ["integr8s_idem.engine.run.Run"]
    assert not public_names().intersection(found)
