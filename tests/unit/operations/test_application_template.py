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


def test_the_written_files_and_the_next_commands_are_printed() -> None:
    status, output = new("billing")

    assert status == 0
    assert output.splitlines() == [
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


def test_missing_extras_are_reported_with_their_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in {"aiosqlite", "pytest_asyncio"} else there(name, package)

    monkeypatch.setattr("integr8s_idem.operations.application_template.find_spec", found)
    prefix = "Not installed yet: install the extra"

    assert f'{prefix} testing,sql: pip install "integr8s-idem[testing,sql]"' in new("shop", "--store", "sqlite")[1]
    assert f'{prefix} testing: pip install "integr8s-idem[testing]"' in new("billing")[1]


@pytest.mark.parametrize(
    ("name", "why", "instead"),
    [
        ("class", "Python keyword", "class_app"),
        ("My-Shop", "lowercase letters", "my_shop"),
        ("1shop", "starting with a letter", "shop"),
        ("shop.orders", "lowercase letters", "shop_orders"),
        ("../shop", "lowercase letters", "shop"),
        ("schön", "lowercase letters", "sch_n"),
        ("-", "lowercase letters", "shop"),
        ("json", "module of the standard library", "json_app"),
        ("pydantic", "is installed", "pydantic_app"),
        ("tests", "application's tests", "tests_app"),
    ],
)
def test_an_invalid_name_is_refused_with_a_suggestion(name: str, why: str, instead: str) -> None:
    with pytest.raises(ApplicationError, match=rf'invalid application name "{name}": .*{why}.*; try {instead}'):
        application_files(name)


def test_a_folder_that_is_not_empty_is_refused() -> None:
    Path("billing").mkdir()
    Path("billing/mine.txt").write_text("mine")

    status, output = new("billing")

    assert status == 2
    assert "billing already exists and is not empty: nothing was written" in output
    assert [path.name for path in Path("billing").iterdir()] == ["mine.txt"]


def test_a_file_is_not_overwritten() -> None:
    Path("billing").write_text("mine")

    assert new("billing")[0] == 2
    assert Path("billing").read_text() == "mine"


def test_an_empty_folder_can_be_used() -> None:
    Path("a folder").mkdir()

    status, output = new("billing", "--into", "a folder")

    assert status == 0
    assert "    cd 'a folder'\n" in output
    assert Path("a folder/billing/handlers.py").is_file()


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        ("redis", RedisStoreSettings),
        ("sqlite", SqliteStoreSettings),
        ("postgresql", PostgresqlStoreSettings),
    ],
)
def test_the_settings_contain_the_chosen_store(store: str, kind: type) -> None:
    status, _ = new("billing", "--store", store)

    assert status == 0
    assert isinstance(load_settings(Path("billing/settings.toml")).store, kind)


@pytest.mark.parametrize("store", list(Store))
def test_all_placeholders_are_replaced(store: Store) -> None:
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
def test_the_readme_names_the_source_of_the_library(
    origin: str | None, requirement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of importlib.metadata, or of its backport where that is installed.
    kind = type(distribution("integr8s-idem"))
    read = kind.read_text
    monkeypatch.setattr(kind, "read_text", lambda self, name: origin if name == "direct_url.json" else read(self, name))

    assert f'pip install -e . "{requirement}"\n' in application_files("shop")[Path("README.md")]
