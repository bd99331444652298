"""Find the tests of each fault matrix row by parsing the sources, without importing them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]


def marked(folder: Path = TESTS) -> dict[int, list[str]]:
    """Return the marked functions, classes and files by row, as pytest node IDs."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        name = path.relative_to(folder.parent).as_posix()
        for place, numbers in _marks(ast.parse(path.read_text())):
            for number in numbers:
                found[number].append("::".join((name, *place)))
    return dict(found)


def _marks(module: ast.Module) -> Iterator[tuple[tuple[str, ...], list[int]]]:
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                yield (), _numbers(value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield (node.name,), _all(node.decorator_list)
            case ast.ClassDef():
                yield (node.name,), _all(node.decorator_list)
                for inner in node.body:
                    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield (node.name, inner.name), _all(inner.decorator_list)


def _all(decorators: list[ast.expr]) -> list[int]:
    return [number for decorator in decorators for number in _numbers(decorator)]


def _numbers(expression: ast.expr) -> list[int]:
    """Return the arguments of every `pytest.mark.scenario(...)` in the expression."""
    return [
        argument.value
        for call in ast.walk(expression)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "scenario"
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, int)
    ]
