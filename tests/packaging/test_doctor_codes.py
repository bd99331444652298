"""The pages about doctor match the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from integr8s_idem.config import Settings, StoreSettings
from integr8s_idem.diagnostics import Code, Severity
from integr8s_idem.doctor.permissions import access_of
from tests.packaging.repository import ROOT

PAGE = (ROOT / "docs" / "reference" / "doctor.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z-]+)` \| ([a-z, ]+) \| (.+) \|$", PAGE, re.MULTILINE)
HOW_TO = ROOT / "docs" / "how-to"
KINDS = sorted(model.model_fields["kind"].annotation.__args__[0] for model in get_args(get_args(StoreSettings)[0]))
TESTS = [file for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name != "packaging"]


def expected_in(file: Path) -> Iterator[str]:
    """Yield the codes, or their names, in assertions, comprehensions and parameters of the tests in a file."""
    for test in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) or not test.name.startswith("test_"):
            continue
        asserted = [node for node in ast.walk(test) if isinstance(node, ast.Assert | ast.ListComp)]
        for node in (inner for part in [*asserted, *test.decorator_list] for inner in ast.walk(part)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Code":
                yield node.attr


@pytest.fixture(scope="module")
def expected() -> set[str]:
    return {name for file in TESTS for name in expected_in(file)}


def test_the_page_explains_every_code_once_and_no_other() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(code.value for code in Code)


@pytest.mark.parametrize(("name", "severities"), [(name, severities) for name, severities, _ in ROWS])
def test_severities_on_the_page_exist(name: str, severities: str) -> None:
    assert {word.strip() for word in severities.split(",")} <= {severity.value for severity in Severity}, name


@pytest.mark.parametrize("code", Code)
def test_every_code_is_expected_by_a_test(code: Code, expected: set[str]) -> None:
    """Tests run the check; a mere mention in the source would not prove that it works."""
    assert {code.value, code.name} & expected


def printed(kind: str) -> str:
    return access_of(Settings.model_validate({"store": {"kind": kind}}))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("memory", "sqlite")])
def test_the_page_lists_the_printed_rights_of_every_store_kind(kind: str) -> None:
    assert printed(kind)
    assert f"\n| `{kind}` | " in PAGE


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_names_every_store_kind_that_doctor_checks(kind: str) -> None:
    checked = PAGE[PAGE.index("Every kind of store is looked at") : PAGE.index("`--acl` prints")]

    assert f"`{kind}`" in checked


def test_the_grants_on_the_page_match_the_printed_ones() -> None:
    page = (HOW_TO / "prepare-sql.md").read_text(encoding="utf-8")
    shown = [line.strip() for line in page.splitlines() if line.startswith(("CREATE ROLE ", "GRANT "))]

    assert shown == printed("postgresql").splitlines()[:3]


def test_the_actions_on_the_page_match_the_printed_ones() -> None:
    page = (HOW_TO / "prepare-dynamodb.md").read_text(encoding="utf-8")
    shown = [line.split() for line in page.splitlines() if line.startswith("dynamodb:")]

    statements = json.loads(printed("dynamodb"))["Statement"]

    actions = [[action.removeprefix("dynamodb:") for action in statement["Action"]] for statement in statements]
    assert [[word.removeprefix("dynamodb:") for word in line] for line in shown] == actions
