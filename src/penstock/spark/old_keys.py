"""What an update of a primary key leaves behind, on its way through a sink's steps.

A stream of kind `rows` tells it as a delete of the old key beside the update, so it must have no value
that the sink's transform takes away, and goes where the update goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import orjson
import pyarrow as pa

from penstock.message import OLD_KEY

_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES: Final = msgspec.json.Decoder(list[str])
_ENCODE: Final = msgspec.json.Encoder().encode

Record = Callable[[str], str]
Names = Callable[[Sequence[str]], list[str]]


def transformed(messages: pa.RecordBatch, record: Record, names: Names) -> pa.RecordBatch:
    """Return messages whose old keys have what `record` makes of their JSON.

    `names` gives the new names of those columns that the WAL does not tell. The row's key itself stays
    in the metadata.
    """

    def change(old: dict[str, str]) -> dict[str, str]:
        fields = _OBJECT.decode(old["metadata"])
        lacking = _NAMES.decode(fields["unavailable"])
        fields["unavailable"] = msgspec.Raw(orjson.dumps(names(lacking)))
        return {"record": record(old["record"]), "metadata": _ENCODE(fields).decode()}

    return _changed(messages, lambda _, old: change(old))


def routed(messages: pa.RecordBatch, routes: pa.Array) -> pa.RecordBatch:
    """Return messages whose old keys' metadata have their routes; `routes` has nulls for none."""

    def change(row: int, old: dict[str, str]) -> dict[str, str]:
        route = routes[row].as_py()
        if route is None:
            return old
        metadata = f'{old["metadata"][:-1]},"route":{orjson.dumps(route).decode()}}}'
        return {**old, "metadata": metadata}

    return _changed(messages, change)


def _changed(
    messages: pa.RecordBatch, change: Callable[[int, dict[str, str]], dict[str, str]]
) -> pa.RecordBatch:
    old = messages.column("old_key")
    if old.null_count == len(old):
        return messages
    values: list[Any] = old.to_pylist()
    new = [None if value is None else change(row, value) for row, value in enumerate(values)]
    at = messages.schema.get_field_index("old_key")
    return messages.set_column(at, messages.schema.field(at), pa.array(new, OLD_KEY))
