"""Rows of parameters told to PostgreSQL as one array a column: the same text, prepared once, for any number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Select, TableValuedAlias, any_, bindparam, column, func
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import TypeEngine


def told(types: Mapping[str, TypeEngine[Any]]) -> TableValuedAlias:
    """A table of as many rows as the parameters have items; each column has the name of its parameter."""
    return _unnested(types, [bindparam(one, type_=ARRAY(type_)) for one, type_ in types.items()])


def rows_of(types: Mapping[str, TypeEngine[Any]], rows: Sequence[tuple[Any, ...]]) -> TableValuedAlias:
    """A table of `rows`."""
    columns = zip(*rows, strict=True) if rows else [()] * len(types)
    values = [_array(list(values), type_) for values, type_ in zip(columns, types.values(), strict=True)]
    return _unnested(types, values)


def _unnested(types: Mapping[str, TypeEngine[Any]], arrays: list[BindParameter[Any]]) -> TableValuedAlias:
    columns = [column(one, type_) for one, type_ in types.items()]
    return func.unnest(*arrays).table_valued(*columns).render_derived()


def among(found: ColumnElement[Any], values: Sequence[Any]) -> ColumnElement[bool]:
    """IN, without a parameter for each."""
    return found == any_(_array(list(values), found.type))


def chosen(found: ColumnElement[Any], asked: Select[Any]) -> ColumnElement[bool]:
    """Whether `found` is what `asked`, executed once and before all else, answers with."""
    answer = func.array(asked.correlate(None).scalar_subquery(), type_=ARRAY(found.type))
    return found == any_(answer)


def _array(values: list[Any], type_: TypeEngine[Any]) -> BindParameter[Any]:
    return bindparam(None, values, type_=ARRAY(type_), unique=True)
