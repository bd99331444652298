"""Creation of engines from URLs, and timeouts of the drivers."""

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
def test_an_engine_uses_the_async_driver_of_its_database(url: str, driver: str) -> None:
    assert sql_engine(url).url.drivername == driver


def test_an_unsupported_database_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(StoreConfigurationError, match=r"oracle databases are not supported; use one of .*postgresql"):
        sql_engine("oracle://h/x")


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [("postgresql://h/x", "asyncpg", "sql"), ("mysql://h/x", "aiomysql", "mysql"), ("sqlite:///x", "aiosqlite", "sql")],
)
def test_a_missing_driver_is_reported_with_the_extra_to_install(
    url: str, driver: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)

    with pytest.raises(StoreConfigurationError, match=rf'needs {driver}; .*pip install "integr8s-idem\[{extra}\]"'):
        sql_engine(url)


async def test_a_timeout_of_the_driver_reports_its_own_duration() -> None:
    with pytest.raises(StoreUnavailableError, match="no answer from postgresql within 0 s"):
        async with guarded("migrate", timedelta(minutes=5), "postgresql"):
            raise TimeoutError
