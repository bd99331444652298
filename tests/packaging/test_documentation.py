"""Programs in the documentation run, and its links and references are valid."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from datetime import timedelta
from inspect import getsource
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

import integr8s_idem
from examples import dict_store
from examples.dict_store import DictStore
from integr8s_idem.cli.app import app
from integr8s_idem.config import settings_warnings
from integr8s_idem.config.loading import load_settings
from integr8s_idem.worker.dead_letters import BODY_BYTES, BODY_SHA256, DROPPED, PREFIX, DeadLetter
from tests.packaging import reference
from tests.packaging.repository import ROOT, anchors, code_blocks, files, name_of, without_code
from tests.support.batch_loop import one_batch
from tests.support.fake_consumer import FakeRecord
from tests.support.keys_desk import Desk, event

README = (ROOT / "README.md").read_text(encoding="utf-8")
WORKER = (ROOT / "docs" / "explanation" / "worker.md").read_text(encoding="utf-8")
PROGRAMS = code_blocks(README, "python")
PAGES = list(files(".md"))
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
PATH_IN_CODE = re.compile(
    r"`((?:integr8s_idem|tests|examples|docs|providers|services|deploy|benchmarks)/[\w./*{},-]*)`"
)

MAKE_CONTAINERS = """
if "platform" in globals():
    import asyncio
    from integr8s_idem import Settings
    from integr8s_idem.runtime import make_container
    for service in platform.services.values():
        asyncio.run(make_container(service, Settings()).close())
"""


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_every_program_of_the_readme_runs(number: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[number] + MAKE_CONTAINERS, encoding="utf-8")

    ran = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_first_program_of_the_readme_is_the_first_minute_example() -> None:
    example = (ROOT / "examples" / "first_minute.py").read_text(encoding="utf-8")

    assert example.endswith(PROGRAMS[0])
    assert example.startswith('"""')


@pytest.mark.parametrize("number", range(len(code_blocks(README, "toml"))))
def test_the_settings_in_the_readme_are_valid(number: int, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(code_blocks(README, "toml")[number], encoding="utf-8")

    assert settings_warnings(load_settings(file)) == []


def test_the_store_suite_matches_its_page() -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-store.md").read_text(encoding="utf-8")
    suite, provider = code_blocks(page, "python")

    assert (ROOT / "tests" / "contract" / "test_examples.py").read_text(encoding="utf-8").endswith(suite)
    exec(compile(provider, "write-a-store.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_link_targets_exist(page: Path) -> None:
    for link in LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link["target"]):
            address = urlsplit(link["target"])  # external addresses are not requested
            assert address.scheme == "https", link["target"]
            assert re.fullmatch(r"[a-z0-9.-]+\.[a-z]{2,}", address.netloc), link["target"]
            continue
        place, _, anchor = unquote(link["target"]).partition("#")
        target = page.parent / place if place else page

        assert target.exists(), f"{name_of(page)} links to the missing {link['target']}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link["target"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_on_a_page_exist(page: Path) -> None:
    for named in PATH_IN_CODE.findall(page.read_text(encoding="utf-8")):
        patterns = [named]
        if (choice := re.search(r"\{([^}]*)\}", named)) is not None:
            patterns = [named.replace(choice[0], part) for part in choice[1].split(",")]

        for pattern in patterns:
            assert any(ROOT.glob(pattern.rstrip("/"))), f"{name_of(page)} names the missing {pattern}"


def test_the_store_page_shows_the_code_of_the_example() -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-store.md").read_text(encoding="utf-8")
    walk = page[page.index("## The example, step by step") : page.index("## What the suite checks")]
    named = re.findall(r"`(_?[a-z]+(?:_[a-z]+)*|Row)`", walk)

    assert [name for name in named if not hasattr(DictStore, name) and not hasattr(dict_store, name)] == ["warnings"]
    assert {"Row", "_alive", "_reserve", "_take", "_keep", "_owned", "_settle_one", "_under"} <= set(named)


def test_the_batch_loop_on_the_page_is_the_tested_one() -> None:
    page = (ROOT / "docs" / "how-to" / "handle-batches.md").read_text(encoding="utf-8")

    assert getsource(one_batch) in code_blocks(page, "python")


def test_the_keys_commands_run_as_their_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "how-to" / "look-up-keys.md").read_text(encoding="utf-8")
    desk = Desk(tmp_path, f'kind = "sqlite"\npath = "{tmp_path / "idem.db"}"')
    for value in ("0192-a", "0192-b", "0192-c"):
        desk.take(event(value), lease=timedelta(seconds=100))
    monkeypatch.chdir(tmp_path)
    lines = [line.split() for block in code_blocks(page, "sh") for line in block.splitlines()]

    assert {line[2] for line in lines} == {"list", "show", "explain", "release", "purge"}
    for program, *arguments in lines:
        assert program == "integr8s-idem"
        changes = ["--yes", "--audit-file", "audit.jsonl"] if arguments[1] in ("release", "purge") else []
        answer = CliRunner().invoke(app, [*arguments, *changes])
        assert answer.exit_code == 0, (arguments, answer.output)


def test_the_operator_settings_cover_every_kind_of_store() -> None:
    page = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")
    limits = page[page.index("## What an operator sets") : page.index("## What to watch")]

    assert [name for name in ("Redis", "PostgreSQL", "MySQL", "SQLite", "DynamoDB") if f"| {name} " not in limits] == []


def test_the_dead_letter_rule_names_exactly_the_headers_that_are_written() -> None:
    rule = re.search(r"\*\*R9\..*?(?=\n\n)", WORKER, re.DOTALL)
    assert rule is not None
    dead_letter = DeadLetter(
        "malformed", ValueError("why"), "charge", "order:1", record="r", attempts=1, event_type="order", event_id="1"
    )
    record = FakeRecord("orders", 0, 0, None, b"")
    headers = {name for name, _ in dead_letter.headers(record, "billing", "billing")} | {
        DROPPED,
        BODY_BYTES,
        BODY_SHA256,
    }

    named = [word for word in re.findall(r"`([a-z0-9-]+)`", rule[0]) if word != PREFIX]

    assert sorted(PREFIX + word for word in named) == sorted(headers)


def test_the_reference_matches_the_code() -> None:
    made = reference.pages()
    there = set(reference.FOLDER.glob("*.md")) | set(made)

    assert {file: file.read_text(encoding="utf-8") for file in there if file.exists()} == made, "run `make reference`"


@pytest.mark.parametrize("page", sorted(reference.FOLDER.glob("*.md")), ids=lambda page: page.name)
def test_no_attribute_is_described_only_by_its_own_name(page: Path) -> None:
    assert re.findall(r"^\| `(\w+)` \| `\1` \|.*", page.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_every_public_object_has_a_docstring() -> None:
    assert [entry.path for entry in reference.entries().values() if entry.thing.docstring is None] == []


def test_docstrings_name_existing_parameters() -> None:
    unknown = {entry.path: list(reference.unknown_parameters(entry.thing)) for entry in reference.entries().values()}

    assert {path: names for path, names in unknown.items() if names} == {}


def test_the_reference_covers_the_package_and_every_module_with_exports() -> None:
    documented = {entry.path for entry in reference.entries().values()}
    modules = {module for page in reference.PAGES.values() for module in page}

    assert {f"integr8s_idem.{name}" for name in integr8s_idem.__all__} <= documented
    assert set(reference.modules_with_exports()) - modules == reference.LEFT_OUT


def tables_of(markdown: str) -> list[list[list[str]]]:
    """Return the tables of a page as rows of cells, headings first."""
    found = re.findall(r"(?:^\|.*\|\n)+", markdown, re.MULTILINE)
    return [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()] for table in found
    ]


@pytest.mark.parametrize(
    "page", [*sorted(reference.FOLDER.glob("*.md")), reference.FOLDER.parent / "cli.md"], ids=name_of
)
def test_reference_tables_have_no_empty_column_or_heading(page: Path) -> None:
    for headings, _, *rows in tables_of(page.read_text(encoding="utf-8")):
        assert all(headings), headings
        assert all(any(column) for column in zip(*rows, strict=True)), headings


@pytest.mark.filterwarnings("ignore:It looks like `register_random`")
def test_names_in_the_reference_can_be_imported() -> None:
    for entry in reference.entries().values():
        module, _, name = entry.heading.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry.heading
