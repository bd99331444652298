"""SQL statements that grant the database user of a worker its minimum permissions."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import make_url
from sqlalchemy.dialects import mysql, postgresql

from integr8s_idem.config import MysqlStoreSettings, PostgresqlStoreSettings
from integr8s_idem.stores.sql.schema import buckets, outbox, records, store

_DEFAULT_USER: Final = "worker"

_PERMISSIONS: Final = {records.name: "SELECT, INSERT, UPDATE, DELETE", store.name: "SELECT, UPDATE"}
_OUTBOX_PERMISSIONS: Final = {outbox.name: "SELECT, INSERT, DELETE", buckets.name: "SELECT, UPDATE"}
_TRANSACTIONAL: Final = "-- for transactional handlers: the outbox and its relay"


def access_of(settings: PostgresqlStoreSettings | MysqlStoreSettings) -> list[str]:
    """Return statements that grant what a worker needs; `store migrate` needs more permissions."""
    if isinstance(settings, MysqlStoreSettings):
        return _grant_in_mysql(settings.username or _DEFAULT_USER, make_url(settings.url).database or "idempotency")
    return _grant_in_postgresql(settings.username or _DEFAULT_USER)


def _grant_in_postgresql(user: str) -> list[str]:
    dialect: Any = postgresql.dialect  # SQLAlchemy does not annotate it
    quoted = dialect().identifier_preparer.quote(user)
    return [
        f"CREATE ROLE {quoted} LOGIN PASSWORD 'PASSWORD';",
        *(f"GRANT {permissions} ON {table} TO {quoted};" for table, permissions in _PERMISSIONS.items()),
        _TRANSACTIONAL,
        *(f"GRANT {permissions} ON {table} TO {quoted};" for table, permissions in _OUTBOX_PERMISSIONS.items()),
        f"GRANT USAGE ON SEQUENCE {outbox.name}_id_seq TO {quoted};",
    ]


def _grant_in_mysql(user: str, database: str) -> list[str]:
    dialect: Any = mysql.dialect  # SQLAlchemy does not annotate it
    schema = dialect().identifier_preparer.quote_identifier(database)
    account = "'" + user.replace("\\", "\\\\").replace("'", "''") + "'@'%'"
    return [
        f"CREATE USER IF NOT EXISTS {account} IDENTIFIED BY 'PASSWORD';",
        *(f"GRANT {permissions} ON {schema}.{table} TO {account};" for table, permissions in _PERMISSIONS.items()),
        _TRANSACTIONAL,
        *(
            f"GRANT {permissions} ON {schema}.{table} TO {account};"
            for table, permissions in _OUTBOX_PERMISSIONS.items()
        ),
    ]
