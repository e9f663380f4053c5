"""What an update of a primary key leaves behind, on its way through a sink's steps.

A stream of kind `rows` delivers it as a delete of the old key beside the update, so it must have no
value that the sink's transform takes away, and goes where the update goes. Where the update is not
sent, the row is gone from the old key all the same: then the delete is a message of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.json_members import members, text_of
from penstock.core.message import DELETE, OLD_KEY, OLD_KEY_PART

_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES: Final = msgspec.json.Decoder(list[str])
_ENCODE: Final = msgspec.json.Encoder().encode

_ORDER: Final = ("commit_lsn", "commit_idx", "part")

Record = Callable[[str], str]
Names = Callable[[Sequence[str]], list[str]]


def transformed(messages: pa.RecordBatch, record: Record, names: Names) -> pa.RecordBatch:
    """Return messages whose old keys have what `record` makes of their JSON.

    `names` gives the new names of those columns that the WAL lacks. The row's key itself stays
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


def unsent(captured: pa.RecordBatch, sent: pa.RecordBatch) -> pa.RecordBatch:
    """Return those of the captured updates that left a key and of which nothing is sent.

    Of their old keys the key alone is left: the rest of the old row is nothing that a sink has let
    through.
    """
    left = captured.filter(captured.column("old_key").is_valid())
    known = set(_positions(sent.filter(sent.column("old_key").is_valid())))
    left = left.filter(pa.array([at not in known for at in _positions(left)], pa.bool_()))
    return _changed(left, lambda _, old: {**old, "record": old["key"]})


def with_deletes(messages: pa.RecordBatch, left: pa.RecordBatch) -> pa.RecordBatch:
    """Return messages, and the old keys of `left` as deletes among them, by their positions."""
    record, metadata, _ = left.column("old_key").flatten()
    read = members("idempotency_key")
    names = [text_of(read(text)["idempotency_key"]) for text in metadata.to_pylist()]
    count = left.num_rows
    new = {
        "record": record,
        "changes": pa.nulls(count, pa.string()),
        "action": pa.repeat(DELETE, count),
        "metadata": metadata,
        "idempotency_key": pa.array(names, pa.string()),
        "old_key": pa.nulls(count, OLD_KEY),
        "part": pa.repeat(OLD_KEY_PART, count),
    }
    arrays = [new.get(name, left.column(name)) for name in left.schema.names]
    deletes = pa.RecordBatch.from_arrays(arrays, schema=left.schema)
    both = pa.concat_batches([messages, deletes])
    return both.take(pc.sort_indices(both, [(name, "ascending") for name in _ORDER]))


def _positions(messages: pa.RecordBatch) -> list[tuple[int, int]]:
    lsns, indexes = (messages.column(n).to_pylist() for n in ("commit_lsn", "commit_idx"))
    return list(zip(lsns, indexes, strict=True))


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
