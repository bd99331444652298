"""The least that a user of the database needs, once an administrator has made the tables."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy.dialects import postgresql

from integr8s_idem.stores.sql.schema import records, store

_RIGHTS: Final = {records.name: "SELECT, INSERT, UPDATE, DELETE", store.name: "SELECT, UPDATE"}


def grants(user: str) -> list[str]:
    """Statements for PostgreSQL that give `user` what a worker does; `store migrate` needs the owner of the tables."""
    dialect: Any = postgresql.dialect  # SQLAlchemy gives it no types
    quoted = dialect().identifier_preparer.quote(user)
    return [f"GRANT {rights} ON {table} TO {quoted};" for table, rights in _RIGHTS.items()]
