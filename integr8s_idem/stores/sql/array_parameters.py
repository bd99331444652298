"""Pass many rows to PostgreSQL as one array per column, so that one prepared statement serves any number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Select, TableValuedAlias, any_, bindparam, column, func
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import TypeEngine


def parameter_table(types: Mapping[str, TypeEngine[Any]]) -> TableValuedAlias:
    """Return a table built from array parameters; each column is named for its parameter."""
    return _unnest(types, [bindparam(name, type_=ARRAY(type_)) for name, type_ in types.items()])


def value_table(types: Mapping[str, TypeEngine[Any]], rows: Sequence[tuple[Any, ...]]) -> TableValuedAlias:
    """Return a table that contains `rows`."""
    columns = zip(*rows, strict=True) if rows else [()] * len(types)
    values = [_array(list(values), type_) for values, type_ in zip(columns, types.values(), strict=True)]
    return _unnest(types, values)


def _unnest(types: Mapping[str, TypeEngine[Any]], arrays: list[BindParameter[Any]]) -> TableValuedAlias:
    columns = [column(name, type_) for name, type_ in types.items()]
    return func.unnest(*arrays).table_valued(*columns).render_derived()


def equals_any(element: ColumnElement[Any], values: Sequence[Any]) -> ColumnElement[bool]:
    """Return the equivalent of `element IN values` with a single parameter."""
    return element == any_(_array(list(values), element.type))


def in_query_result(element: ColumnElement[Any], query: Select[Any]) -> ColumnElement[bool]:
    """Return whether `element` is in the result of `query`, which runs once, before the rest of the statement."""
    result = func.array(query.correlate(None).scalar_subquery(), type_=ARRAY(element.type))
    return element == any_(result)


def _array(values: list[Any], type_: TypeEngine[Any]) -> BindParameter[Any]:
    return bindparam(None, values, type_=ARRAY(type_), unique=True)
