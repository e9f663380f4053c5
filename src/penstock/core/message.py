"""The words that every part shares: the position, the message's columns, the idempotency key.

Between the source and the sinks messages travel as Arrow record batches of `WIRE_SCHEMA`, one row a
message. JSON is built once, in the capture, and never parsed again on the way unless a sink needs
a field of it; the envelope that a consumer sees is put together from these columns by the sinks, with
Arrow kernels and no Python object a row.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

INSERT: Final = "insert"
UPDATE: Final = "update"
DELETE: Final = "delete"
TRUNCATE: Final = "truncate"
READ: Final = "read"

ACTIONS: Final = (INSERT, UPDATE, DELETE, TRUNCATE, READ)
DEFAULT_ACTIONS: Final = (INSERT, UPDATE, DELETE)


class Position(NamedTuple):
    """Where a message stands in its source: the transaction's commit LSN, then its index in it.

    Compares as a tuple, so positions of one source are totally ordered, and a position inside a
    transaction is as good an offset as one at its end.
    """

    lsn: int
    idx: int

    def to_offset(self) -> dict[str, str | int]:
        """Return the JSON form that a Spark checkpoint keeps: `{"lsn": "0/16B3748", "idx": 3}`."""
        return {"lsn": format_lsn(self.lsn), "idx": self.idx}

    @classmethod
    def from_offset(cls, offset: dict[str, str | int]) -> Self:
        """Read `to_offset`'s form back; raises `ValueError` or `KeyError` on anything else."""
        return cls(parse_lsn(str(offset["lsn"])), int(offset["idx"]))


def is_behind(messages: pa.RecordBatch, position: Position) -> pa.Array:
    """Return of each message (`WIRE_SCHEMA`) whether it lies behind a position."""
    lsn, idx = messages.column("commit_lsn"), messages.column("commit_idx")
    same = pc.and_(pc.equal(lsn, position.lsn), pc.greater(idx, position.idx))
    return pc.or_(pc.greater(lsn, position.lsn), same)


class RoundPart(NamedTuple):
    """Part `part` (from 0) of `parts` of the round (start, end], in the source's positions.

    `plan` is another number for each round that is made: after a crash the same messages may be split
    into parts otherwise, and parts of two plans do not make a whole. Where there is a `sink`, the
    messages are those of a backfill, for that sink alone. `id` names the part among its capture's. All
    messages up to `done` were durable in every sink, or in its backlog, when the part was handed out.
    `look` asks to look in the store which sinks are behind.
    """

    start: Position
    end: Position
    part: int
    parts: int
    plan: int = 0
    sink: str | None = None
    id: int = 0
    done: Position = Position(0, -1)
    look: bool = True

    def to_json(self) -> list[Any]:
        """Return the part as reports to the run have it."""
        return [[*self.start], [*self.end], *self[2:5]]

    @classmethod
    def from_json(cls, values: list[Any]) -> Self:
        """Read `to_json`'s form back."""
        start, end, *rest = values
        return cls(Position(*start), Position(*end), *rest)


def format_lsn(lsn: int) -> str:
    """Return an LSN as Postgres prints it: 0x16B3748 becomes `0/16B3748`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the 64-bit integer of an LSN that Postgres printed; raises `ValueError` otherwise."""
    high, slash, low = text.partition("/")
    if not slash:
        raise ValueError(f"not an LSN: {text!r} (expected the form 0/16B3748)")
    return int(high, 16) << 32 | int(low, 16)


def source_tag(system_identifier: str, database: str, slot: str) -> str:
    """Return the part of an idempotency key that identifies the source: 16 hexadecimal digits.

    LSNs repeat between clusters, and commit indexes between publications, so the key of a message
    needs both: what Postgres calls the cluster (`IDENTIFY_SYSTEM`), and the slot.
    """
    name = "\0".join((system_identifier, database, slot)).encode()
    return hashlib.blake2b(name, digest_size=8).hexdigest()


OLD_KEY: Final = pa.struct(
    [
        pa.field("record", pa.string()),
        pa.field("metadata", pa.string()),
        pa.field("key", pa.string()),  # JSON object: the key's columns alone
    ]
)
"""Of a delete message."""

WIRE_SCHEMA: Final = pa.schema(
    [
        pa.field("record", pa.string()),  # JSON object
        pa.field("changes", pa.string()),  # JSON object, null unless action is update
        pa.field("action", pa.string()),
        pa.field("table_schema", pa.string()),
        pa.field("table_name", pa.string()),
        pa.field("metadata", pa.string()),  # JSON object, all but `consumer`
        pa.field("idempotency_key", pa.string()),  # <source tag>-<commit_lsn>-<commit_idx>
        pa.field("commit_lsn", pa.int64()),
        pa.field("commit_idx", pa.int64()),
        pa.field("group_hash", pa.int64()),  # see `penstock.core.group_hash`
        pa.field("old_group_hash", pa.int64()),  # the group left behind where an update moved it
        pa.field("old_key", OLD_KEY),  # the delete of the primary key left behind, likewise
        pa.field("part", pa.int32()),  # n-th of the messages that a transform made of one, else 0
    ]
)
"""The columns of a message on its way from the source to the sinks."""

NO_MESSAGES: Final = pa.RecordBatch.from_pylist([], schema=WIRE_SCHEMA)

SUBJECT_FIELD: Final = pa.field("subject", pa.string())
"""A column that may follow those of `WIRE_SCHEMA`: the NATS subject of each message, null where the
sink's template gives it."""

NO_PART: Final = pa.scalar(0, pa.int32())
"""The part of a message that no transform multiplied."""
OLD_KEY_PART: Final = pa.scalar(-1, pa.int32())
"""The part of the delete of a key that was left: it stands before what was made of the update."""
