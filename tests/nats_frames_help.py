"""Batches for a NATS sink, and the frames that it makes of them, read as a server does."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pyarrow as pa

from penstock.config.nats import NatsSinkConfig
from penstock.core.message import WIRE_SCHEMA
from penstock.sinks.nats.frames import Encoder

INBOX = b"_INBOX.abc."


def batch(count: int, **columns: list[Any]) -> pa.RecordBatch:
    usual: dict[str, list[Any]]
    usual = {
        "record": [json.dumps({"id": n}) for n in range(count)],
        "changes": [None] * count,
        "action": ["insert"] * count,
        "table_schema": ["public"] * count,
        "table_name": ["orders"] * count,
        "metadata": ['{"database":"db"}'] * count,
        "idempotency_key": [f"t-{n}-0" for n in range(count)],
        "commit_lsn": list(range(count)),
        "commit_idx": [0] * count,
        "group_hash": list(range(count)),
        "old_group_hash": [None] * count,
        "old_key": [None] * count,
        "part": [0] * count,
    }
    return pa.record_batch(usual | columns, schema=WIRE_SCHEMA)


def encoder(**settings: Any) -> Encoder:
    return Encoder(NatsSinkConfig(**settings), "orders", "shop", INBOX)


def parse_frames(data: bytes) -> list[tuple[str, int, str, Any]]:
    """Read frames as a server does: by their lengths. Gives subject, number, header, body."""
    found = []
    while data:
        line, _, data = data.partition(b"\r\n")
        word, subject, reply, header, total = line.split(b" ")
        assert word == b"HPUB"
        body = data[int(header) : int(total)]
        assert data[int(header) - 4 : int(header)] == b"\r\n\r\n"
        assert data[int(total) : int(total) + 2] == b"\r\n"
        found.append(
            (
                subject.decode(),
                int(reply.removeprefix(INBOX)),
                data[: int(header)].decode(),
                orjson.loads(body),
            )
        )
        data = data[int(total) + 2 :]
    return found
