"""The language of filters, SQL transforms and routes: parsed, checked, typed. No Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core import lazy

if TYPE_CHECKING:
    from penstock.expressions.catalog import Columns, ColumnType, load_columns
    from penstock.expressions.errors import ExpressionError
    from penstock.expressions.nodes import Typed
    from penstock.expressions.parse import parse_condition, parse_select, parse_value
    from penstock.expressions.syntax import Expression
    from penstock.expressions.types import Field, Kind, Reference, Type
    from penstock.expressions.typing import typed

__all__ = [
    "ColumnType",
    "Columns",
    "Expression",
    "ExpressionError",
    "Field",
    "Kind",
    "Reference",
    "Type",
    "Typed",
    "load_columns",
    "parse_condition",
    "parse_select",
    "parse_value",
    "typed",
]

__getattr__ = lazy.names(
    __name__,
    {
        "Columns": "catalog",
        "ColumnType": "catalog",
        "load_columns": "catalog",
        "ExpressionError": "errors",
        "Typed": "nodes",
        "parse_condition": "parse",
        "parse_select": "parse",
        "parse_value": "parse",
        "Expression": "syntax",
        "Field": "types",
        "Kind": "types",
        "Reference": "types",
        "Type": "types",
        "typed": "typing",
    },
)
