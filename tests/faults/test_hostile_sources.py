"""Checks of the source files: data from outside must never become code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeGuard

import pytest
from redis.asyncio import Redis

from integr8s_idem.records import ReserveRequest
from integr8s_idem.stores.redis import RedisIdempotencyRepository

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path for part in ("integr8s_idem", "providers", "services") for path in (ROOT / part).rglob("*.py"))
LUA = sorted((ROOT / "integr8s_idem").rglob("*.lua"))
_MODULES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "jsonpickle"})
_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
_LOADERS = frozenset({"load", "loads", "Unpickler", "unsafe_load", "full_load", "literal_eval"})


_ALLOWED = {"services/k8s_worker/connection.py": ["yaml"]}
"""The first creates functions from the field names of a class when the class is defined, like `dataclasses`; it never
sees data.  The second only names the error that the Kubernetes client raises for an invalid kubeconfig."""


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the lines at which data could become code."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names if name.name.split(".")[0] in _MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in _MODULES:
                yield node.lineno, module
            case ast.Call(func=ast.Name(id=name)) if name in _BUILTINS:
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (
                name in _LOADERS and owner in _MODULES
            ):
                yield node.lineno, f"{owner}.{name}"
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                yield node.value.lineno, "shell=True"


@pytest.mark.scenario(101)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_data_becomes_code(path: Path) -> None:
    found = [what for _, what in offences(ast.parse(path.read_text()))]

    assert found == _ALLOWED.get(path.relative_to(ROOT).as_posix(), [])


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from yaml import load", "eval(x)", "exec(x)", "marshal.loads(x)", "run(x, shell=True)"],
)
def test_code_execution_from_data_would_be_detected(line: str) -> None:
    assert len(list(offences(ast.parse(line)))) == 1


@pytest.mark.scenario(105)
def test_scripts_are_read_from_files_and_never_assembled() -> None:
    scripts = ROOT / "integr8s_idem/stores/redis/scripts.py"
    tree = ast.parse(scripts.read_text())

    texts = [ast.unparse(node.value) for node in ast.walk(tree) if is_assigned(node, "text")]
    assert texts == ["files(__package__).joinpath(f'{name}.lua').read_text('utf-8')"]
    assert not [node for node in ast.walk(tree) if is_call_of(node, "format", "replace", "join")]
    for path in SHIPPED:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert [node for node in nodes if is_call_of(node, "eval", "register_script")] == [], path
        assert [node for node in nodes if isinstance(node, ast.Constant) and node.value == "EVAL"] == [], path
        loaded = {ast.unparse(node.args[0]) for node in nodes if is_call_of(node, "script_load")}
        assert loaded <= {"script.text", "text"}, path
        # Scripts are created only where their files are read.
        assert path == scripts or "Script(" not in path.read_text(), path


@pytest.mark.scenario(105)
@pytest.mark.parametrize("path", LUA, ids=lambda path: path.name)
def test_a_script_accesses_only_its_keys_and_runs_no_data(path: Path) -> None:
    text = re.sub(r"--[^\n]*", "", path.read_text())
    commands = set(re.findall(r"p?call\('(\w+)'", text))

    assert commands <= {"TIME", "GET", "SET", "SETRANGE", "PTTL", "PEXPIRE", "UNLINK"}
    assert len(re.findall(r"\bp?call\(", text)) == len(re.findall(r"\bp?call\('\w+'", text))
    assert not re.search(r"\b(loadstring|load|dofile|setfenv|KEYS\s*\.\.|'KEYS'|'SCAN')", text)


def is_assigned(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]


def is_call_of(node: ast.AST, *names: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


@pytest.mark.scenario(105)
@pytest.mark.parametrize("name", ["k'] .. redis.call('FLUSHALL') --", "k\r\nFLUSHALL\r\n", "*1\r\n$8\r\nFLUSHALL\r\n"])
async def test_keys_and_owners_that_look_like_commands_are_data(redis_client: Redis, name: str) -> None:
    await redis_client.set("bystander", "here")
    store = RedisIdempotencyRepository(redis_client)
    lease = timedelta(seconds=30)
    request = ReserveRequest(key=name, token=b"t" * 16, lease=lease, retention=lease, owner=name)

    await store.reserve([request])

    assert sorted(await redis_client.keys()) == sorted([b"bystander", name.encode()])
    assert [record.owner for record in await store.get([name]) if record] == [name]
