"""The least that a user of the database needs, once an administrator has made the tables."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import make_url
from sqlalchemy.dialects import mysql, postgresql

from integr8s_idem.config import MysqlStoreSettings, PostgresqlStoreSettings
from integr8s_idem.stores.sql.schema import buckets, outbox, records, store

_USER: Final = "worker"
"""Where the settings name none."""

_RIGHTS: Final = {records.name: "SELECT, INSERT, UPDATE, DELETE", store.name: "SELECT, UPDATE"}
_OUTBOX: Final = {outbox.name: "SELECT, INSERT, DELETE", buckets.name: "SELECT, UPDATE"}
_WHERE_TRANSACTIONAL: Final = "-- and where handlers commit together with their records: the outbox, and its relay"


def access_of(settings: PostgresqlStoreSettings | MysqlStoreSettings) -> list[str]:
    """Statements that give the user of these settings what a worker does; `store migrate` needs more."""
    if isinstance(settings, MysqlStoreSettings):
        return _of_mysql(settings.username or _USER, make_url(settings.url).database or "idempotency")
    return _of_postgresql(settings.username or _USER)


def _of_postgresql(user: str) -> list[str]:
    dialect: Any = postgresql.dialect  # SQLAlchemy gives it no types
    quoted = dialect().identifier_preparer.quote(user)
    return [
        f"CREATE ROLE {quoted} LOGIN PASSWORD 'PASSWORD';",
        *(f"GRANT {rights} ON {table} TO {quoted};" for table, rights in _RIGHTS.items()),
        _WHERE_TRANSACTIONAL,
        *(f"GRANT {rights} ON {table} TO {quoted};" for table, rights in _OUTBOX.items()),
        f"GRANT USAGE ON SEQUENCE {outbox.name}_id_seq TO {quoted};",
    ]


def _of_mysql(user: str, database: str) -> list[str]:
    dialect: Any = mysql.dialect  # as above
    schema = dialect().identifier_preparer.quote_identifier(database)
    account = "'" + user.replace("\\", "\\\\").replace("'", "''") + "'@'%'"
    return [
        f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY 'PASSWORD';",
        *(f"GRANT {rights} ON {schema}.{table} TO {account};" for table, rights in _RIGHTS.items()),
        _WHERE_TRANSACTIONAL,
        *(f"GRANT {rights} ON {schema}.{table} TO {account};" for table, rights in _OUTBOX.items()),
    ]
