"""The language of filters, SQL transforms and routes: parsed, checked, typed. No Spark."""

from __future__ import annotations

from penstock.expressions.catalog import Columns, ColumnType, load_columns
from penstock.expressions.errors import ExpressionError
from penstock.expressions.types import Field, Kind, Reference, Type

__all__ = [
    "ColumnType",
    "Columns",
    "ExpressionError",
    "Field",
    "Kind",
    "Reference",
    "Type",
    "load_columns",
]
