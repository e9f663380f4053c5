"""The columns of a Spark user's frame, made of the wire's columns and turned into them.

record STRING      JSON: NEW values of an insert or update, OLD values of a delete
changes STRING     JSON: OLD values of the columns that an update changed; null otherwise
action STRING      insert, update, delete, truncate
metadata STRUCT    as in the message; commit_timestamp a TIMESTAMP, record_pks a JSON array
group_hash BIGINT  hash of the group, as `penstock.core.group_hash` defines it
"""

from __future__ import annotations

from datetime import UTC
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.group_hash import group_hash, key_start
from penstock.core.json_members import members
from penstock.core.message import NO_PART, OLD_KEY, WIRE_SCHEMA

_LIST: Final = pa.list_(pa.field("element", pa.string()))
_ARROW: Final = {
    "string": pa.string(),
    "bigint": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "array<string>": _LIST,
}
_METADATA: Final = {
    "table_schema": "string",
    "table_name": "string",
    "commit_timestamp": "timestamp",
    "commit_lsn": "bigint",
    "commit_idx": "bigint",
    "transaction_id": "bigint",
    "database": "string",
    "idempotency_key": "string",
    "record_pks": "string",
    "unavailable": "array<string>",
}
_METADATA_FIELDS: Final = [pa.field(name, _ARROW[kind]) for name, kind in _METADATA.items()]
METADATA_DDL: Final = f"struct<{', '.join(f'{n}: {kind}' for n, kind in _METADATA.items())}>"
MESSAGE_DDL: Final = (
    "record string, changes string, action string,"
    f" metadata {METADATA_DDL}, group_hash bigint, old_group_hash bigint"
)
MESSAGE_SCHEMA: Final = pa.schema(
    [
        pa.field("record", pa.string()),
        pa.field("changes", pa.string()),
        pa.field("action", pa.string()),
        pa.field("metadata", pa.struct(_METADATA_FIELDS)),
        pa.field("group_hash", pa.int64()),
        pa.field("old_group_hash", pa.int64()),
    ]
)

_METADATA_MEMBERS: Final = members(
    "commit_timestamp", "transaction_id", "database", "unavailable", "record_pks"
)


def to_messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a wire batch with `MESSAGE_SCHEMA`'s columns."""
    rows = _METADATA_MEMBERS.rows(batch.column("metadata").to_pylist())
    raw = [[bytes(value or b"null") for value in row] for row in rows]
    # The keys stay as they are written: a number may have more digits than a parser keeps.
    keys = [row.pop() for row in raw]
    metadata = [[orjson.loads(value) for value in row] for row in raw]
    stamps = pa.array([stamp[:-1] for stamp, *_ in metadata], pa.string())
    fields = [
        batch.column("table_schema"),
        batch.column("table_name"),
        pc.assume_timezone(pc.cast(stamps, pa.timestamp("us")), "UTC"),
        batch.column("commit_lsn"),
        batch.column("commit_idx"),
        pa.array([xid for _, xid, _, _ in metadata], pa.int64()),
        pa.array([database for _, _, database, _ in metadata], pa.string()),
        batch.column("idempotency_key"),
        pa.array(keys, pa.string()),
        pa.array([names for _, _, _, names in metadata], _LIST),
    ]
    return pa.RecordBatch.from_arrays(
        [
            batch.column("record"),
            batch.column("changes"),
            batch.column("action"),
            pa.StructArray.from_arrays(fields, fields=_METADATA_FIELDS),
            batch.column("group_hash"),
            batch.column("old_group_hash"),
        ],
        schema=MESSAGE_SCHEMA,
    )


def to_wire(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return messages with the wire's columns, for a sink.

    Without a column `group_hash` the groups are the rows' own keys.
    """
    rows = batch.column("metadata").to_pylist()
    names = batch.schema.names
    none = pa.nulls(batch.num_rows, pa.int64())
    columns = {name: batch.column(name) for name in ("record", "changes", "action")}
    for name in ("table_schema", "table_name", "idempotency_key", "commit_lsn", "commit_idx"):
        columns[name] = pa.array([m[name] for m in rows], WIRE_SCHEMA.field(name).type)
    columns |= {
        "metadata": pa.array([orjson.dumps(_json(m)) for m in rows], pa.string()),
        "group_hash": batch.column("group_hash")
        if "group_hash" in names
        else pa.array([_group_hash(m) for m in rows], pa.int64()),
        "old_group_hash": batch.column("old_group_hash") if "old_group_hash" in names else none,
        "old_key": pa.nulls(batch.num_rows, OLD_KEY),
        "part": batch.column("part") if "part" in names else pa.repeat(NO_PART, batch.num_rows),
    }
    return pa.RecordBatch.from_arrays(
        [columns[f.name].cast(f.type) for f in WIRE_SCHEMA], schema=WIRE_SCHEMA
    )


def _group_hash(metadata: dict[str, Any]) -> int:
    keys: str = metadata["record_pks"] or "[]"
    start = key_start(metadata["table_schema"] or "", metadata["table_name"] or "")
    return group_hash(start + keys.encode() + b"]")


def _json(metadata: dict[str, Any]) -> dict[str, Any]:
    at = metadata["commit_timestamp"]
    # Spark returns timestamps in the session's zone.
    stamp = None if at is None else at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    keys = orjson.Fragment(metadata["record_pks"] or "[]")
    return {**metadata, "commit_timestamp": stamp, "record_pks": keys}
