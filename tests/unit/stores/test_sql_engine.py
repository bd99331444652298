"""Engines by their URLs, and limits of time that are not ours."""

from __future__ import annotations

import sys
from datetime import timedelta

import pytest

from integr8s_idem.errors import StoreConfigurationError, StoreUnavailableError
from integr8s_idem.stores.sql import sql_engine
from integr8s_idem.stores.sql.errors import guarded


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://h/x", "postgresql+asyncpg"),
        ("postgres://h/x", "postgresql+asyncpg"),
        ("postgresql+psycopg://h/x", "postgresql+asyncpg"),
        ("mysql://h/x", "mysql+aiomysql"),
        ("mariadb://h/x", "mysql+aiomysql"),
        ("sqlite:///x.db", "sqlite+aiosqlite"),
    ],
)
def test_a_url_as_settings_take_it_makes_an_engine(url: str, driver: str) -> None:
    assert sql_engine(url).url.drivername == driver


def test_a_database_that_is_no_store_is_refused_and_those_that_are_get_named() -> None:
    with pytest.raises(StoreConfigurationError, match=r"oracle databases are not supported; use one of .*postgresql"):
        sql_engine("oracle://h/x")


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [("postgresql://h/x", "asyncpg", "sql"), ("mysql://h/x", "aiomysql", "mysql"), ("sqlite:///x", "aiosqlite", "sql")],
)
def test_a_driver_that_is_not_installed_is_told_with_what_to_install(
    url: str, driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)

    with pytest.raises(StoreConfigurationError, match=rf'needs {driver}; .*pip install "integr8s-idem\[{extra}\]"'):
        sql_engine(url)


async def test_a_limit_of_the_driver_is_not_told_as_ours() -> None:
    with pytest.raises(StoreUnavailableError, match="no answer from postgresql within 0 s"):
        async with guarded("migrate", timedelta(minutes=5), "postgresql"):
            raise TimeoutError
