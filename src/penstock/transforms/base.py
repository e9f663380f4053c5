"""What a transform takes and gives: batches of `WIRE_SCHEMA`, and the messages that failed.

A transform may change a message's record, changes and action, and add to its metadata. What identifies
the change (the table, the position, the keys) stays as captured: order, replays and deduplication rest
on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.message import ACTIONS
from penstock.transforms.json_values import Raw, decode_raw, encode

CODE: Final = "transform_failed"
MOST_MESSAGES: Final = 1_000
"""How many messages one may become."""

RESERVED: Final = (
    "table_schema", "table_name", "commit_timestamp", "commit_lsn", "commit_idx", "transaction_id",
    "database", "idempotency_key", "record_pks", "unavailable", "consumer", "route",
)  # fmt: skip
"""The metadata that a transform can read, and not change."""


class TransformError(Exception):
    """A transform that cannot be made: the message names what is wrong in the operator's code."""


class FailedMessage(NamedTuple):
    """A message that could not be transformed: its row in the batch, and why."""

    row: int
    code: str
    reason: str


@dataclass(frozen=True)
class Transformed:
    """What became of a batch.

    Attributes:
        batch: The messages that came out, in the order of those that they were made of.
        origin: For each of them the row of the batch that went in.
        part: For each of them its place among the messages made of the same one, from 0.
        failed: The rows that became nothing because they failed; a row that is neither here nor in
            `origin` was dropped.
    """

    batch: pa.RecordBatch
    origin: pa.Array
    part: list[int]
    failed: list[FailedMessage]


class MessageTransform(Protocol):
    """The operator's code over batches; one thread at a time uses it."""

    def __call__(self, batch: pa.RecordBatch) -> Transformed:
        """Return what the messages of `batch`, whose schema begins with `WIRE_SCHEMA`, become."""
        ...

    def close(self) -> None:
        """Free what it holds; it is not called again."""
        ...


class Output(NamedTuple):
    """One message that came out. None stands for what stays as it was."""

    record: str | None = None
    changes: str | None = None
    """JSON; the text `null` for none."""
    action: str | None = None
    extras: str | None = None
    """A JSON object of metadata to add."""


SAME: Final = (Output(),)
"""What a message becomes that nothing is changed in."""


def captured(batch: pa.RecordBatch) -> list[list[Any]]:
    """Return the columns record, changes, action and metadata as lists of texts."""
    return [batch.column(name).to_pylist() for name in ("record", "changes", "action", "metadata")]


def assemble(
    batch: pa.RecordBatch, columns: Sequence[list[Any]], results: Iterable[Sequence[Output] | str]
) -> Transformed:
    """Return what came of `batch`, given for each row its messages, or the reason why it failed.

    `columns` are those of `captured`. A reason stands for the row alone; more than `MOST_MESSAGES`
    are the transform's to refuse.
    """
    records, changes, actions, metadata = columns
    keys: list[str] = batch.column("idempotency_key").to_pylist()
    out: tuple[list[Any], ...] = ([], [], [], [], [])
    put = [column.append for column in out]
    origin: list[int] = []
    part: list[int] = []
    failed: list[FailedMessage] = []
    for row, result in enumerate(results):
        if isinstance(result, str):
            failed.append(FailedMessage(row, CODE, result))
            continue
        for n, message in enumerate(result):
            meta, key = metadata[row], keys[row]
            if n:
                meta, key = _numbered(meta, key, n)
            if message.extras is not None:
                meta = with_extras(meta, message.extras)
            old = message.changes
            put[0](records[row] if message.record is None else message.record)
            put[1](changes[row] if old is None else None if old == "null" else old)
            put[2](actions[row] if message.action is None else message.action)
            put[3](meta)
            put[4](key)
            origin.append(row)
            part.append(n)
    whole = len(origin) == batch.num_rows and not any(part) and not failed
    rows = pa.array(origin, pa.int64())
    base = batch if whole else batch.take(rows)
    names = ("record", "changes", "action", "metadata", "idempotency_key")
    new = {name: pa.array(texts, pa.string()) for name, texts in zip(names, out, strict=True)}
    new["part"] = pa.array(part, pa.int32())
    if any(part):
        # What an update has left behind is left once.
        first = pa.array([n == 0 for n in part], pa.bool_())
        old_key = base.column("old_key")
        new["old_key"] = pc.if_else(first, old_key, pa.scalar(None, old_key.type))
    arrays = [new.get(name, base.column(name)) for name in batch.schema.names]
    return Transformed(pa.RecordBatch.from_arrays(arrays, schema=batch.schema), rows, part, failed)


def with_extras(metadata: str, extras: str) -> str:
    """Return `metadata` with what `extras`, none of it `RESERVED`, adds; what is captured stays."""
    known = decode_raw(metadata)
    for name, value in decode_raw(extras).items():
        known.setdefault(name, value)
    return encode(known).decode()


def _numbered(metadata: str, key: str, n: int) -> tuple[str, str]:
    """Return the metadata and the key of the `n`-th message made of one."""
    new = f"{key}-{n}"
    # As the capture writes it; the value can stand nowhere else, as quotes in a name are escaped.
    text = metadata.replace(f'"idempotency_key":"{key}"', f'"idempotency_key":"{new}"', 1)
    if text == metadata:
        fields = decode_raw(metadata)
        fields["idempotency_key"] = Raw(encode(new))
        text = encode(fields).decode()
    return text, new


def known_action(action: object) -> str | None:
    """Return what is wrong with an action that a transform gave, or None."""
    if isinstance(action, str) and action in ACTIONS:
        return None
    return f"action is {str(action)[:40]!r}: expected one of {', '.join(ACTIONS)}"
