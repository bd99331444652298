"""`integr8s-idem new`: which names it takes, where it writes, and what it says."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import ModuleSpec
from importlib.metadata import distribution
from pathlib import Path

import pytest
from typer.testing import CliRunner

from integr8s_idem.cli.app import app
from integr8s_idem.config import PostgresqlStoreSettings, RedisStoreSettings, SqliteStoreSettings, load_settings
from integr8s_idem.errors import ApplicationError
from integr8s_idem.operations.application_template import Store, application_files


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.upper().startswith("INTEGR8S_IDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def new(*arguments: str) -> tuple[int, str]:
    """Exit status, and what was printed."""
    result = CliRunner().invoke(app, ["new", *arguments])
    return result.exit_code, result.output


def test_what_was_written_is_shown_as_a_tree_with_what_to_type_next() -> None:
    status, said = new("billing")

    assert status == 0
    assert said.splitlines() == [
        "billing/",
        "├── billing/",
        "│   ├── __init__.py",
        "│   ├── containers.py",
        "│   ├── events.py",
        "│   ├── handlers.py",
        "│   ├── payments.py",
        "│   ├── place_order.py",
        "│   └── workers.py",
        "├── tests/",
        "│   ├── __init__.py",
        "│   ├── conftest.py",
        "│   ├── fakes.py",
        "│   └── test_handlers.py",
        "├── .gitignore",
        "├── README.md",
        "├── pyproject.toml",
        "└── settings.toml",
        "",
        "Next:",
        "    cd billing",
        "    python -m pytest",
        "    integr8s-idem run billing.workers:platform --embedded",
    ]
    assert {str(path) for path in Path("billing").rglob("*") if path.is_file()} == {
        str(Path("billing", path)) for path in application_files("billing")
    }


def test_what_is_not_installed_is_told_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in {"aiosqlite", "pytest_asyncio"} else there(name, package)

    monkeypatch.setattr("integr8s_idem.operations.application_template.find_spec", found)
    told = "Not installed yet: install the extra"

    assert f'{told} testing,sql: pip install "integr8s-idem[testing,sql]"' in new("shop", "--store", "sqlite")[1]
    assert f'{told} testing: pip install "integr8s-idem[testing]"' in new("billing")[1]


@pytest.mark.parametrize(
    ("name", "why", "instead"),
    [
        ("class", "word of Python's own", "class_app"),
        ("My-Shop", "small letters", "my_shop"),
        ("1shop", "no digit first", "shop"),
        ("shop.orders", "small letters", "shop_orders"),
        ("../shop", "small letters", "shop"),
        ("schön", "small letters", "sch_n"),
        ("-", "small letters", "shop"),
        ("json", "Python has a module", "json_app"),
        ("pydantic", "is installed", "pydantic_app"),
        ("tests", "tests of the application", "tests_app"),
    ],
)
def test_a_name_that_can_be_none_is_refused_with_one_that_could(name: str, why: str, instead: str) -> None:
    with pytest.raises(ApplicationError, match=rf'"{name}" cannot be .*{why}.*; {instead} could'):
        application_files(name)


def test_nothing_is_written_where_something_is() -> None:
    Path("billing").mkdir()
    Path("billing/mine.txt").write_text("mine")

    status, said = new("billing")

    assert status == 2
    assert "billing is there and is not empty: nothing was written" in said
    assert [path.name for path in Path("billing").iterdir()] == ["mine.txt"]


def test_nothing_is_written_over_a_file() -> None:
    Path("billing").write_text("mine")

    assert new("billing")[0] == 2
    assert Path("billing").read_text() == "mine"


def test_an_empty_folder_of_another_name_is_taken() -> None:
    Path("a folder").mkdir()

    status, said = new("billing", "--into", "a folder")

    assert status == 0
    assert "    cd 'a folder'\n" in said
    assert Path("a folder/billing/handlers.py").is_file()


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        ("redis", RedisStoreSettings),
        ("sqlite", SqliteStoreSettings),
        ("postgresql", PostgresqlStoreSettings),
    ],
)
def test_the_settings_name_the_store_that_was_asked_for(store: str, kind: type) -> None:
    status, _ = new("billing", "--store", store)

    assert status == 0
    assert isinstance(load_settings(Path("billing/settings.toml")).store, kind)


@pytest.mark.parametrize("store", list(Store))
def test_no_mark_of_a_template_is_left(store: Store) -> None:
    assert not [path for path, text in application_files("billing", store).items() if "$" in text]


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        (
            '{"url": "file:///home/me/idem/wheels/integr8s_idem-0.1.0-py3-none-any.whl", "archive_info": {}}',
            "integr8s-idem[testing,embedded] @ file:///home/me/idem/wheels/integr8s_idem-0.1.0-py3-none-any.whl",
        ),
        (None, "integr8s-idem[testing,embedded]"),
    ],
)
def test_the_readme_names_what_the_library_was_installed_from(
    origin: str | None, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of importlib.metadata, or of its backport where that is installed.
    kind = type(distribution("integr8s-idem"))
    read = kind.read_text
    monkeypatch.setattr(kind, "read_text", lambda self, name: origin if name == "direct_url.json" else read(self, name))

    assert f'pip install -e . "{requirement}"\n' in application_files("shop")[Path("README.md")]
