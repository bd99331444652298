"""All code on the pages is run, loaded or looked up, as described in `tests/packaging/snippets.py`."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import asyncpg
import pytest
import yaml
from sqlalchemy import make_url

from integr8s_idem import Settings
from integr8s_idem.config.loading import load_settings
from integr8s_idem.stores.sql import ddl
from providers.settings import PlatformSettings
from tests.packaging import snippets
from tests.packaging.repository import ROOT, name_of
from tests.packaging.snippets import Block
from tests.support.postgres import PostgresServer

PAGES = list(snippets.pages())
HOW_TO = [page for page in PAGES if page.is_relative_to(ROOT / "docs" / "how-to")]
EVERY = [block for page in PAGES for block in snippets.blocks(page)]
PART_OF, RUN_BY = "part of ", "run by "
"""Reasons not to run a block here: a tested file contains it, or another test extracts it from the page."""


def of(language: str) -> list[Block]:
    return [block for block in EVERY if block.language == language and not block.reason]


def with_python() -> list[Path]:
    return [page for page in PAGES if any(not block.reason for block in snippets.blocks(page, "python"))]


def hidden_from(page: Path) -> list[Block]:
    return [block for block in snippets.blocks(page, "python") if block.is_hidden]


def parsed(block: Block) -> ast.Module:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    module = compile(block.text, str(block), "exec", flags, dont_inherit=True)
    assert isinstance(module, ast.Module)
    return module


def imported(block: Block) -> set[str]:
    """Return the names that a block imports, except from `tests`."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for statement in parsed(block).body
        if isinstance(statement, ast.Import)
        or (isinstance(statement, ast.ImportFrom) and not f"{statement.module}".startswith("tests"))
        for alias in statement.names
    }


@pytest.mark.parametrize("page", [page for page in HOW_TO if hidden_from(page)], ids=name_of)
def test_a_page_that_hides_code_links_to_a_complete_program(page: Path) -> None:
    links = re.findall(r"\]\(\.\./\.\./(examples/[\w/]+\.py)\)", page.read_text(encoding="utf-8"))

    assert links, "the page does not link to a complete program"
    assert all((ROOT / link).is_file() for link in links)


@pytest.mark.parametrize("page", [page for page in HOW_TO if hidden_from(page)], ids=name_of)
def test_a_snippet_imports_what_it_uses(page: Path) -> None:
    """Readers cannot see hidden imports."""
    shown = [block for block in snippets.blocks(page, "python") if not block.is_hidden and not block.reason]
    hidden_imports = set().union(*(imported(block) for block in hidden_from(page)))
    known: set[str] = set()
    missing: list[str] = []
    for block in shown:
        known |= imported(block)
        used = {node.id for node in ast.walk(parsed(block)) if isinstance(node, ast.Name)}
        missing += [f"{block}: {name}" for name in sorted(used & hidden_imports - known)]

    assert missing == []


@pytest.fixture
def page_module(tmp_path: Path) -> Iterator[ModuleType]:
    """Create the module in which the code of a page runs, with an empty `folder` and the stack `closing`.

    It is registered, so that annotations can be resolved.
    """
    module = ModuleType("page")
    vars(module).update(folder=tmp_path, closing=AsyncExitStack())
    sys.modules["page"] = module
    yield module
    del sys.modules["page"]


@pytest.mark.filterwarnings("ignore:It looks like `register_random`")
@pytest.mark.parametrize("page", with_python(), ids=name_of)
def test_python_on_a_page_runs(page: Path, page_module: ModuleType) -> None:
    names = vars(page_module)
    with asyncio.Runner() as runner:
        try:
            for block in (block for block in snippets.blocks(page, "python") if not block.reason):
                source = "\n" * (block.line - 1) + block.text  # so that a traceback names the line of the page
                code = compile(source, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
                if code.co_flags & inspect.CO_COROUTINE:
                    runner.run(eval(code, names))
                else:
                    exec(code, names)
        finally:
            runner.run(names["closing"].aclose())


@pytest.mark.parametrize("block", of("toml"), ids=str)
def test_toml_blocks_are_valid_settings(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(block.text, encoding="utf-8")

    load_settings(file, PlatformSettings if "[platform]" in block.text else Settings)


@pytest.mark.parametrize("block", [*of("sh"), *of("console")], ids=str)
def test_shell_commands_refer_to_existing_things(block: Block) -> None:
    assert list(snippets.mistakes_in_shell(block.text)) == []


@pytest.mark.parametrize("page", [page for page in PAGES if snippets.named_commands(page)], ids=name_of)
def test_commands_in_sentences_exist(page: Path) -> None:
    mistakes = [mistake for line in snippets.named_commands(page) for mistake in snippets.mistakes_in_shell(line)]

    # A sentence may name a group of commands.
    assert [mistake for mistake in mistakes if not mistake.endswith("(none given)")] == []


@pytest.mark.parametrize("page", [page for page in PAGES if snippets.indented(page)], ids=name_of)
def test_indented_commands_refer_to_existing_things(page: Path) -> None:
    """Pages that are read as plain text indent commands, followed by explanations."""
    typed = [
        line.strip().partition("  ")[0]
        for text in snippets.indented(page)
        for line in dedent(text).splitlines()
        if line.startswith(("make ", "python ", "pip ", "integr8s-idem ", "docker ", "curl ", ".venv/"))
    ]

    assert [mistake for line in typed for mistake in snippets.mistakes_in_shell(line)] == []


async def test_sql_statements_run_on_a_real_server(shared_postgres: PostgresServer) -> None:
    connection = await asyncpg.connect(shared_postgres.url.replace("+asyncpg", ""))
    attempt = connection.transaction()
    await attempt.start()
    try:
        # The server is shared, and other tests may have created the tables.
        await connection.execute("CREATE SCHEMA pages; SET LOCAL search_path = pages")
        await connection.execute(ddl(make_url("postgresql://").get_dialect()()))
        for block in of("sql"):
            await connection.execute(block.text)
    finally:
        await attempt.rollback()
        await connection.close()


def test_yaml_and_json_blocks_can_be_parsed() -> None:
    for block in of("json"):
        json.loads(block.text)
    for block in of("yaml"):
        assert all(isinstance(document, dict | list) for document in yaml.safe_load_all(block.text)), block


@pytest.mark.parametrize("block", [block for block in EVERY if block.reason], ids=str)
def test_blocks_that_are_not_run_here_are_run_elsewhere(block: Block) -> None:
    assert block.reason.startswith((PART_OF, RUN_BY)), f"{block}: {block.reason}"
    if block.reason.startswith(RUN_BY):
        assert f'"{block.page.name}"' in (ROOT / block.reason.removeprefix(RUN_BY)).read_text(encoding="utf-8")
        return

    file = ROOT / block.reason.removeprefix(PART_OF)

    assert any(file.is_relative_to(folder) for folder in (ROOT / "tests", ROOT / "examples", snippets.SCAFFOLD))
    assert block.text.strip() in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_states_its_language(page: Path) -> None:
    assert [
        f"{block}: {block.language}" for block in snippets.blocks(page) if block.language not in snippets.LANGUAGES
    ] == []
    if page.is_relative_to(ROOT / "docs"):
        assert snippets.indented(page) == [], "use a fenced block with ```text"


@pytest.mark.parametrize(
    ("typed", "mistake"),
    [
        ("integr8s-idem rnu", "integr8s-idem has no command rnu"),
        ("integr8s-idem run --fast a:b", "integr8s-idem run has no option --fast"),
        ("PYTHONPATH=. python -m examples.nothing", "module examples.nothing not found"),
        ("cd shop && make coffee", "unknown make target coffee"),
        ("pip install '.[sql,lead]'", "unknown extra lead"),
        ("frobnicate --all", "unknown program frobnicate"),
    ],
)
def test_an_invalid_command_is_reported(typed: str, mistake: str) -> None:
    assert list(snippets.mistakes_in_shell(typed)) == [mistake]
