"""What the filters of a consumer let through; `streams.consumers.selection` has the same in SQL."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.consumers import ANY, Filters
from penstock.config.nats_consumers import names_all
from penstock.core.tables import TablePattern, matches_any, provider_of


def selected(filters: Filters, messages: pa.RecordBatch) -> pa.RecordBatch:
    """Return those of `messages` (`WIRE_SCHEMA`) that the filters name, whatever their `sql`."""
    named = mask(filters, messages)
    return messages if named is None else messages.filter(named)


def mask(filters: Filters, messages: pa.RecordBatch) -> pa.BooleanArray | None:
    """Return of each message whether the filters name it; None where they name all."""
    if not messages.num_rows or names_all(filters):
        return None
    columns = [messages.column(name) for name in ("table_schema", "table_name", "action")]
    kinds = pc.binary_join_element_wise(*columns, "\0").dictionary_encode()
    takes = [names(filters, *kind.split("\0")) for kind in kinds.dictionary.to_pylist()]
    return None if all(takes) else pa.array(takes, pa.bool_()).take(kinds.indices)


def names(filters: Filters, schema: str, table: str, action: str) -> bool:
    """Return whether the filters name a table's messages, of one action."""
    return (
        _names(filters.table, schema, table)
        and _names(filters.collection_id, schema, table)
        and (ANY in filters.resource_id or schema in filters.resource_id)
        and (ANY in filters.sync_id or schema in filters.sync_id)
        and (ANY in filters.provider or provider_of(table) in filters.provider)
        and (ANY in filters.action or action in filters.action)
    )


def _names(tables: Sequence[str], schema: str, table: str) -> bool:
    return any(
        name in (ANY, table)
        if "." not in name or ":" in name
        else matches_any((TablePattern.parse(name),), schema, table)
        for name in tables
    )
