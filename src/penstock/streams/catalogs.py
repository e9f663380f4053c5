"""The tables and columns of sources, as their runs have noted them in the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from penstock.expressions.catalog import Columns, ColumnType


def catalog_body(columns: Columns) -> list[dict[str, Any]]:
    """Return a catalog as JSON has it."""
    return [
        {
            "schema": schema,
            "table": table,
            "columns": {name: asdict(column) for name, column in of_table.items()},
        }
        for (schema, table), of_table in columns.items()
    ]


def read_catalog(body: list[dict[str, Any]]) -> Columns:
    """Return the catalog that `catalog_body` was called on."""
    return {
        (entry["schema"], entry["table"]): {
            name: _column(column) for name, column in entry["columns"].items()
        }
        for entry in body
    }


def _column(body: Mapping[str, Any]) -> ColumnType:
    element = body["element"]
    return ColumnType(
        **{
            **body,
            "labels": tuple(body["labels"]),
            "element": None if element is None else _column(element),
        }
    )
