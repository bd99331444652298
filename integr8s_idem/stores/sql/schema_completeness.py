"""What a database lacks of the tables, columns and indexes of this code."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Index, Table, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateIndex, CreateTable

from integr8s_idem.stores.sql.schema import metadata


def missing_tables(connection: Connection) -> list[str]:
    return [step.element.name for step in unmade(connection) if isinstance(step.element, Table)]


def missing_indexes(connection: Connection) -> list[str]:
    """Of tables that are there: of one that is not, what belongs to it is no news."""
    steps = [step.element for step in unmade(connection)]
    absent = [one for one in steps if isinstance(one, Table)]
    return [str(one.name) for one in steps if isinstance(one, Index) and one.table not in absent]


def unmade(connection: Connection) -> Iterator[CreateTable | CreateIndex]:
    """Statements that make what is not there."""
    found = inspect(connection)
    for table in metadata.sorted_tables:
        there = found.has_table(table.name)
        if not there:
            yield CreateTable(table)
        names = {one["name"] for one in found.get_indexes(table.name)} if there else set()
        yield from (CreateIndex(index) for index in table.indexes if index.name not in names)


def missing_columns(connection: Connection) -> list[str]:
    """Columns, as `table.column`, that tables which are there lack: the database is of an earlier version."""
    found = inspect(connection)
    return [
        f"{table.name}.{column.name}"
        for table in metadata.sorted_tables
        if found.has_table(table.name)
        for column in table.columns
        if column.name not in {one["name"] for one in found.get_columns(table.name)}
    ]
