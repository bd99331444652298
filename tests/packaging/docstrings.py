"""Check the docstrings of the public API: `python -m tests.packaging.docstrings`, part of `make check`.

The public API is everything in `docs/reference/api/`. Each function and method

- has a docstring, and so has each property, unless a base class or a Protocol of the package documents it;
- lists each error that it raises itself, or a base class of it, under `Raises:`;
- states the unit of each `float`, in the name (`_seconds`, `_bytes`) or in the text; a `timedelta` needs none;
- states the order of a sequence that it returns, or that there is one item for each of something.

Factories of providers and test methods are exempt.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import griffe

from integr8s_idem import errors
from tests.packaging import reference
from tests.packaging.repository import ROOT, name_of

UNITS: Final = re.compile(
    r"\b(milli|micro)?seconds?\b|\bbytes?\b|\bminutes?\b|\bhours?\b|\bshare\b|\bratio\b|\btimes as\b|\bfrom 0 to 1\b"
)
NAMED_UNIT: Final = re.compile(r"_(seconds|bytes|ms|ratio)$|^(seconds|bytes|ratio)$")
ORDER: Final = re.compile(r"\border(ed)?\b|\bsorted\b|\b(new|old|lat)est\b|\bearliest\b|\bfirst\b|\bone for\b|\beach\b")
SEQUENCE: Final = re.compile(r"^(list|tuple|Sequence|Iterator|Iterable|AsyncIterator|AsyncIterable|AsyncGenerator)\[")
FLOAT: Final = re.compile(r"\bfloat\b")


@dataclass(frozen=True)
class Problem:
    """A defect of a docstring."""

    place: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.place}:{self.line}: {self.message}"


def problems() -> list[Problem]:
    """Return the defects of the whole public API, by file and line."""
    found = {problem for entry in reference.entries().values() for problem in of(entry.thing)}
    return sorted(found, key=lambda problem: (problem.place, problem.line, problem.message))


def of(thing: Any) -> Iterator[Problem]:
    """Check the docstring of a function, or those of a class and its members."""
    thing = thing.final_target if thing.is_alias else thing
    if thing.is_function:
        yield from of_function(thing)
    elif thing.is_class:
        for member in thing.members.values():
            if not member.is_alias and (member.name[0] != "_" or member.name == "__init__"):
                yield from of_member(member)


def of_member(member: Any) -> Iterator[Problem]:
    """Check the docstring of a method, a property or an attribute of a public class."""
    if member.is_function:
        if not (member.name.startswith("test_") or _decorators(member) & {"provide"} or not member.lineno):
            yield from of_function(member)
    elif member.is_attribute:
        if "property" in member.labels:
            yield from _without_docstring(member)
        yield from _without_unit(member, _text(member), member.name, member.annotation)


def of_function(function: Any) -> Iterator[Problem]:
    """Check the docstring of a function or method; for `__init__`, that of its class counts as well."""
    text = _text(function)
    if function.name != "__init__":
        yield from _without_docstring(function)
    for name in sorted(raised_in(function) - _with_subclasses(_documented_errors(text))):
        yield _problem(function, f"raises {name}, but its docstring does not list it under Raises")
    for parameter in function.parameters:
        yield from _without_unit(function, text, parameter.name, parameter.annotation)
    yield from _without_unit(function, text, "return value", function.returns)
    if not _decorators(function) & {"contextmanager", "asynccontextmanager", "fixture"}:
        yield from _without_order(function, text)


def _decorators(function: Any) -> set[str]:
    return {str(each.value).partition("(")[0].rpartition(".")[2] for each in function.decorators}


def _without_docstring(thing: Any) -> Iterator[Problem]:
    if not _text(thing):
        yield _problem(thing, "has no docstring")


def _without_unit(thing: Any, text: str, name: str, annotation: Any) -> Iterator[Problem]:
    is_number = FLOAT.search(str(annotation or ""))
    if is_number and not NAMED_UNIT.search(name) and not UNITS.search(text):
        yield _problem(thing, f"{name} is a float without a unit")


def _without_order(function: Any, text: str) -> Iterator[Problem]:
    if SEQUENCE.match(str(function.returns or "")) and not ORDER.search(text):
        yield _problem(function, f"returns {function.returns} without stating the order")


def _text(thing: Any) -> str:
    """Return the docstring with those that also document the object: of its class, base classes and Protocols."""
    own = str(thing.docstring.value) if thing.docstring is not None else ""
    if not thing.parent.is_class:
        return own
    if thing.name == "__init__":
        return "\n\n".join(filter(None, [own, _doc(thing.parent)]))
    return "\n\n".join(filter(None, [own, _inherited(thing), contracts().get(thing.name, "")]))


def _doc(thing: Any) -> str:
    return str(thing.docstring.value) if thing.docstring is not None else ""


def _inherited(thing: Any) -> str:
    bases = thing.parent.mro() if thing.parent.bases else []
    return "\n\n".join(_doc(base.members[thing.name]) for base in bases if thing.name in base.members)


@cache
def contracts() -> dict[str, str]:
    """Map the name of each method to what the Protocols of the package document for it."""
    documented: dict[str, str] = {}
    for kind in _classes(reference.package()):
        if any("Protocol" in str(base) for base in kind.bases):
            for name, member in kind.members.items():
                documented[name] = f"{documented.get(name, '')}\n\n{_doc(member)}".strip()
    return documented


def _classes(module: Any) -> Iterator[Any]:
    yield from module.classes.values()
    for inner in module.modules.values():
        yield from _classes(inner)


def _documented_errors(text: str) -> set[str]:
    """Return the errors under `Raises:` in a text of one or more docstrings."""
    parsed = griffe.Docstring(text).parse("google", warnings=False)
    raises = griffe.DocstringSectionKind.raises
    named = {str(each.annotation) for section in parsed if section.kind is raises for each in section.value}
    return named | set(re.findall(r"^    (\w+): ", text.partition("Raises:")[2], re.MULTILINE))


def raised_in(function: Any) -> set[str]:
    """Return the exception classes that a function raises itself, without nested functions and re-raised errors."""
    body = _parsed(function)
    return {name for statement in body for name in _raised(statement)}


def _raised(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
            return
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name)) | ast.Name(id=name)) if name[0].isupper():
            yield name
    for child in ast.iter_child_nodes(node):
        yield from _raised(child)


def _parsed(function: Any) -> list[ast.stmt]:
    for node in ast.walk(_module(str(function.filepath))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function.name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first <= function.lineno <= node.lineno:
                return node.body
    return []


@cache
def _module(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _with_subclasses(names: set[str]) -> set[str]:
    """Return the names with all their subclasses in `integr8s_idem.errors`."""
    bases = {name: getattr(errors, name) for name in names if hasattr(errors, name)}
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    return names | {name for name in kinds for base in bases.values() if issubclass(getattr(errors, name), base)}


def _problem(thing: Any, message: str) -> Problem:
    file = Path(thing.filepath)
    place = name_of(file) if file.is_relative_to(ROOT) else file.name
    return Problem(place, thing.lineno, f"{thing.path.removeprefix(f'{reference.PACKAGE}.')} {message}")


def main() -> None:
    """Print each defect with its file and line; exit with status 1 if there are any."""
    found = problems()
    for problem in found:
        print(problem)
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
