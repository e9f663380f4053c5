"""Records as rows of COPY in its binary form, and what of a batch is written. No I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple
from uuid import UUID

from penstock.syncs.connectors.contract import Record
from penstock.syncs.records.payload import Unfit, check_id, check_payload, payload_hash

HEADER: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER: Final = b"\xff\xff"
EXCERPT: Final = 500
"""How many bytes of a refused object are kept."""
_NAMESPACE: Final = UUID("5d0f0a52-6a0e-5a4f-9d6e-0f4f2c1b7c11").bytes
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)
_NULL: Final = b"\xff\xff\xff\xff"
_SIXTEEN, _EIGHT, _FOUR, _ONE = ((n).to_bytes(4, "big") for n in (16, 8, 4, 1))
_SEEN: Final = (5).to_bytes(2, "big") + _FOUR
_DIFFERING: Final = (7).to_bytes(2, "big") + _SIXTEEN
_NEW: Final = (10).to_bytes(2, "big") + _SIXTEEN
_SWEPT: Final = (2).to_bytes(2, "big") + _SIXTEEN
_TRUE, _FALSE = _ONE + b"\1", _ONE + b"\0"
_NO_DATA: Final = b"{}"


@dataclass(frozen=True, slots=True)
class RefusedObject:
    """An object that can't be kept: a dead letter. `text` is the beginning of what came."""

    upstream_id: str
    reason: str
    text: str


class Row(NamedTuple):
    """A record that is to be written, its fields as COPY has them."""

    record: Record
    id: bytes
    hash: bytes
    updated_at: bytes

    @property
    def size(self) -> int:
        """The bytes of its payload."""
        return len(self.record.data)


class Ids:
    """Makes the ids of the records of one collection of a sync: UUIDs of version 5."""

    def __init__(self, sync_id: UUID, collection_id: str) -> None:
        self._begun = hashlib.sha1(
            _NAMESPACE + sync_id.bytes + collection_id.encode() + b"\0", usedforsecurity=False
        )

    def __call__(self, upstream_id: str) -> bytes:
        """Return the 16 bytes of an object's id."""
        made = self._begun.copy()
        made.update(upstream_id.encode())
        found = bytearray(made.digest()[:16])
        found[6] = found[6] & 0x0F | 0x50
        found[8] = found[8] & 0x3F | 0x80
        return bytes(found)


def record_id(sync_id: UUID, collection_id: str, upstream_id: str) -> UUID:
    """Return the id of a record; it is the same for ever."""
    return UUID(bytes=Ids(sync_id, collection_id)(upstream_id))


def rows_of(records: Iterable[Record], ids: Ids) -> tuple[list[Row], list[RefusedObject]]:
    """Return the rows of a batch in the order of their ids, and those whose ids can't be kept.

    Of an object that comes more than once the newest version counts, else the last.
    """
    newest: dict[str, Record] = {}
    refused: list[RefusedObject] = []
    for record in records:
        there = newest.get(record.upstream_id)
        if there is None or not _is_older(record, there):
            newest[record.upstream_id] = record
    rows = []
    for upstream_id, record in newest.items():
        try:
            check_id(upstream_id)
            found = _NULL
            if record.data or not record.deleted:
                found = _SIXTEEN + payload_hash(record.data)
            rows.append(Row(record, ids(upstream_id), found, time(record.updated_at)))
        except Unfit as error:
            refused.append(refused_of(record, str(error)))
    rows.sort(key=_id_of)
    return rows, refused


def checked(rows: Iterable[Row]) -> tuple[list[Row], list[RefusedObject]]:
    """Return which rows can be kept with their payloads, and which can't."""
    fit, refused = list[Row](), list[RefusedObject]()
    for row in rows:
        try:
            if row.record.data or not row.record.deleted:
                check_payload(row.record.data)
            fit.append(row)
        except Unfit as error:
            refused.append(refused_of(row.record, str(error)))
    return fit, refused


def _id_of(row: Row) -> bytes:
    return row.id


def _is_older(record: Record, there: Record) -> bool:
    old, new = there.updated_at, record.updated_at
    return old is not None and new is not None and new < old


def refused_of(record: Record, reason: str) -> RefusedObject:
    """Return a record as one that is refused."""
    text = record.data[:EXCERPT].decode(errors="replace")
    shown = record.upstream_id.encode(errors="replace").decode().replace("\0", "?")
    return RefusedObject(shown[:EXCERPT], reason, text)


def time(value: datetime | None) -> bytes:
    """Return a time as a field."""
    if value is None:
        return _NULL
    since = value - _EPOCH
    # A division of one timedelta by another takes longer than all of this.
    microseconds = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return _EIGHT + microseconds.to_bytes(8, "big", signed=True)


def seen(rows: Sequence[Row]) -> bytes:
    """Return the rows for `copy_seen`: number, id, hash, time, whether it is deleted."""
    parts = [HEADER]
    for n, row in enumerate(rows):
        parts += (
            _SEEN, n.to_bytes(4, "big"), _SIXTEEN, row.id, row.hash, row.updated_at,
            _TRUE if row.record.deleted else _FALSE,
        )  # fmt: skip
    parts.append(TRAILER)
    return b"".join(parts)


def differing(rows: Iterable[Row]) -> bytes:
    """Return the rows for `copy_differing`, payloads included."""
    return _whole(rows, _DIFFERING, b"")


def new(rows: Iterable[Row], sync_id: UUID, provider: str, collection_id: str) -> bytes:
    """Return the rows for `copy_new`."""
    of = _SIXTEEN + sync_id.bytes + _text(provider) + _text(collection_id)
    return _whole(rows, _NEW, of)


def _whole(rows: Iterable[Row], before_id: bytes, after_id: bytes) -> bytes:
    parts = [HEADER]
    for row in rows:
        record = row.record
        data = record.data or _NO_DATA
        parts += (
            before_id, row.id, after_id, _text(record.upstream_id), time(record.created_at),
            row.updated_at, _TRUE if record.deleted else _FALSE, row.hash,
            (len(data) + 1).to_bytes(4, "big"), b"\1", data,
        )  # fmt: skip
    parts.append(TRAILER)
    return b"".join(parts)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return len(encoded).to_bytes(4, "big") + encoded


def swept(sweep: UUID, found: Iterable[bytes]) -> bytes:
    """Return rows for `copy_sweep_ids`."""
    before = _SWEPT + sweep.bytes + _SIXTEEN
    return HEADER + b"".join([before + of for of in found]) + TRAILER
