"""Compare a database with the tables, columns and indexes that this version needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Index, Table, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateIndex, CreateTable

from integr8s_idem.stores.sql.schema import COMPATIBLE_VERSION, VERSION, metadata, outbox, records

ADDED_COLUMNS: Final = {
    2: (records, ("lapsed", "lapsed_alone", "alone", "history_fence")),
    3: (records, ("previous_trace",)),
    4: (outbox, ("created_at",)),
}
"""The columns that each migration adds, and their table."""


def missing_tables(connection: Connection) -> list[str]:
    return [ddl.element.name for ddl in missing_ddl(connection) if isinstance(ddl.element, Table)]


def missing_indexes(connection: Connection) -> list[str]:
    """Return missing indexes of tables that exist."""
    elements = [ddl.element for ddl in missing_ddl(connection)]
    absent = [element for element in elements if isinstance(element, Table)]
    return [str(index.name) for index in elements if isinstance(index, Index) and index.table not in absent]


def missing_ddl(connection: Connection) -> Iterator[CreateTable | CreateIndex]:
    """Yield the statements that create missing tables and indexes."""
    inspector = inspect(connection)
    for table in metadata.sorted_tables:
        exists = inspector.has_table(table.name)
        if not exists:
            yield CreateTable(table)
        names = {index["name"] for index in inspector.get_indexes(table.name)} if exists else set()
        yield from (CreateIndex(index) for index in table.indexes if index.name not in names)


def version_by_columns(connection: Connection) -> int:
    """Return the version of a schema that `COMPATIBLE_VERSION` can work with, by the columns that it has."""
    missing = missing_columns(connection)
    for version, (table, columns) in ADDED_COLUMNS.items():
        if any(f"{table.name}.{column}" in missing for column in columns):
            return version - 1
    return COMPATIBLE_VERSION if missing else VERSION


def missing_columns(connection: Connection) -> list[str]:
    """Return columns that existing tables lack, as `table.column`: the schema is of an earlier version."""
    inspector = inspect(connection)
    return [
        f"{table.name}.{column.name}"
        for table in metadata.sorted_tables
        if inspector.has_table(table.name)
        for column in table.columns
        if column.name not in {found["name"] for found in inspector.get_columns(table.name)}
    ]
