"""Rows of the records table as the capture has them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from penstock.core.message import WIRE_SCHEMA

SYNC = "902261b0-6b22-48a0-8d6b-2fdb16cf8402"
ID = "11111111-2222-5333-8444-555555555555"
HASH = "99999999-2222-3333-4444-555555555555"


def captured(
    action: str = "insert",
    changes: dict[str, Any] | None = None,
    *,
    idx: int = 0,
    **columns: Any,
) -> dict[str, Any]:
    """Return a row of `WIRE_SCHEMA`; `columns` replace those of the table."""
    record = {
        "id": ID,
        "sync_id": SYNC,
        "provider": "servicenow",
        "collection_id": "servicenow:incident",
        "upstream_id": "inc_2891",
        "upstream_created_at": None,
        "upstream_updated_at": "2026-01-31T12:00:00Z",
        "deleted": False,
        "inserted_at": "2026-01-31T12:00:01Z",
        "updated_at": "2026-01-31T12:00:01Z",
        "data": {"state": "open"},
        "payload_hash": HASH,
    } | columns
    key = f"0123456789abcdef-7-{idx}"
    metadata = {
        "table_schema": "penstock", "table_name": "records", "database": "store",
        "commit_timestamp": "2026-01-31T12:00:02.000000Z", "commit_lsn": 7, "transaction_id": 1,
        "idempotency_key": key, "commit_idx": idx, "record_pks": [record["id"]], "unavailable": [],
    }  # fmt: skip
    return {
        "record": _json(record), "changes": None if changes is None else _json(changes),
        "action": action, "table_schema": "penstock", "table_name": "records",
        "metadata": _json(metadata), "idempotency_key": key, "commit_lsn": 7, "commit_idx": idx,
        "group_hash": 1, "old_group_hash": None, "old_key": None, "part": 0,
    }  # fmt: skip


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    """Return rows as a batch."""
    return pa.RecordBatch.from_pylist(list(rows), schema=WIRE_SCHEMA)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
