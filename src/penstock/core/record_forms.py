"""What messages are made of the rows of the records table: records, and events.

A record is the row's JSON without `payload_hash` and with `resource_id`. An event is a record with
`event_id`, `event`, `event_type`, `event_time` and `changes`. Both are cut from what the capture has
made, by the places that the table's columns have: `syncs/records/records.sql` keeps the short ones
before `data`. No I/O.

Budget, in batches of 4,096 rows of 600 bytes on two busy cores: a record takes 2 µs, an inserted or
deleted event 5, an updated one, whose data of ten members are compared one by one, 18. The default
subjects take 7 and 8.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.message import DELETE, INSERT, READ, TRUNCATE, UPDATE

SYNCS: Final = "syncs"
"""The reserved source whose messages these are."""
RECORDS: Final = "records"
EVENTS: Final = "events"
INSERTED, UPDATED, DELETED = "inserted", "updated", "deleted"

_ID_AT: Final = len('{"id":"')
_SYNC_AT: Final = _ID_AT + 36 + len('","sync_id":"')
_SYNC_END: Final = _SYNC_AT + 36
_STRING: Final = r'(?:[^"\\]|\\.)*'
_HEAD: Final = (
    r'^\{"id":"[0-9a-f-]{36}","sync_id":"[0-9a-f-]{36}","provider":"(?P<provider>' + _STRING
    + r')","collection_id":"(?P<collection>' + _STRING + r')","upstream_id":"' + _STRING
    + r'","upstream_created_at":[^,]*,"upstream_updated_at":[^,]*,"deleted":(?P<deleted>true|false),'
)  # fmt: skip
_WAS_DELETED: Final = (
    r'^\{(?:"upstream_created_at":[^,}]*,)?(?:"upstream_updated_at":[^,}]*,)?"deleted":'
)
_TIME: Final = r'"commit_timestamp":(?P<time>"[^"]*"|null)'
_HASH: Final = ',"payload_hash":"00000000-0000-0000-0000-000000000000"}'
_NO_HASH: Final = ',"payload_hash":null}'
_DATA: Final = b',"data":'
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_newest: tuple[Callable[[], pa.RecordBatch | None], pa.StructArray | None] = (lambda: None), None


def _text(value: str) -> pa.Scalar:
    return pa.scalar(value, pa.string())


# Made once: each conversion of a Python value looks for optional modules, 0.1 ms a time.
_NOTHING, _NULL, _TRUE, _END = map(_text, ("", "null", "true", "}"))
_INSERT, _UPDATE, _READ, _DELETE, _TRUNCATE = map(_text, (INSERT, UPDATE, READ, DELETE, TRUNCATE))
_INSERTED, _UPDATED, _DELETED = map(_text, (INSERTED, UPDATED, DELETED))
_NO_TYPE: Final = pa.scalar(None, pa.string())
_NO: Final = pa.scalar(False, pa.bool_())
_OPEN: Final = _text('{"event_id":"')
_RESOURCE: Final = _text(',"resource_id":"')
_QUOTE: Final = _text('"')
_EVENT: Final = _text('","event":"')
_EVENT_TYPE: Final = _text('","event_type":"')
_EVENT_TIME: Final = _text('","event_time":')
_COMMA: Final = _text(",")
_CHANGES: Final = _text(',"changes":')


def form_of(source: str, kind: str) -> str:
    """Return the form of the messages of a sink: `changes`, `rows`, or `events` of the syncs."""
    return EVENTS if source == SYNCS and kind == "changes" else kind


def member_of(form: str) -> str:
    """Return the name of the member of a message that has its record, or its event."""
    return "event" if form == EVENTS else "record"


def passing_rows(batch: pa.RecordBatch, kind: str) -> pa.BooleanArray:
    """Return which rows of the records table are messages of a sink of this kind.

    A purge is no event, nor is what is known of an object only since it was deleted.
    """
    action = batch.column("action")
    if _are_formed(batch):
        return pc.is_valid(action)
    if kind == "rows":
        return pc.not_equal(action, _TRUNCATE)
    return pc.is_valid(_types(batch, _deleted(batch)))


def formed(batch: pa.RecordBatch, kind: str) -> pa.RecordBatch:
    """Return rows of the records table (`WIRE_SCHEMA`, those that pass) as records, or as events.

    Their schema is the sync's id, and their table the collection's. Raises `ValueError` for a row that
    is none of this table.
    """
    if not batch.num_rows or _are_formed(batch):
        return batch
    record = batch.column("record")
    head = _head(batch)
    if head.null_count:
        at = pc.index(pc.is_null(head), True).as_py()
        raise ValueError(f"no row of the records table: {record[at].as_py()[:200]}")
    _, collection, deleted = head.flatten()
    sync = pc.binary_slice(record.cast(pa.binary()), _SYNC_AT, _SYNC_END).cast(pa.string())
    pieces = [*_record(record.cast(pa.binary()), sync)]
    changes = pa.nulls(batch.num_rows, pa.string())
    if kind == "rows":
        text = pc.binary_join_element_wise(*pieces, _END, _NOTHING)
    else:
        types = _types(batch, pc.equal(deleted, _TRUE))
        (time,) = pc.extract_regex(batch.column("metadata"), _TIME).flatten()
        first, *rest = pieces
        # fmt: off - read it as the event it makes
        text = pc.binary_join_element_wise(
            _OPEN,
            batch.column("idempotency_key"),
            _EVENT,
            types,
            _EVENT_TYPE,
            types,
            _EVENT_TIME,
            pc.fill_null(time, _NULL),
            _COMMA,
            pc.utf8_slice_codeunits(first, 1),
            *rest,
            _CHANGES,
            _changes(batch),
            _END,
            _NOTHING,
        )
        # fmt: on
    return _replaced(
        batch, record=text, changes=changes, table_schema=sync, table_name=_names(collection)
    )


def _are_formed(batch: pa.RecordBatch) -> bool:
    """Return whether messages are records or events already: those of replayed dead letters are."""
    first = batch.column("record")[0].as_py() if batch.num_rows else None
    if first is None:
        return False
    return bool(
        first.startswith('{"event_id":"') or first.startswith(',"resource_id":"', _SYNC_END + 1)
    )


def _record(record: pa.Array, sync: pa.Array) -> Sequence[pa.Array | pa.Scalar]:
    """Return the pieces of records, without the brace at the end."""
    first = pc.binary_slice(record, 0, _SYNC_END + 1).cast(pa.string())
    rest = pc.binary_slice(record, _SYNC_END + 1, -len(_HASH))
    hashless = pc.ends_with(record, _NO_HASH)
    if pc.any(hashless).as_py():
        rest = pc.if_else(hashless, pc.binary_slice(record, _SYNC_END + 1, -len(_NO_HASH)), rest)
    return first, _RESOURCE, sync, _QUOTE, rest.cast(pa.string())


def _deleted(batch: pa.RecordBatch) -> pa.BooleanArray:
    """Return of each row whether its record is deleted now; false where that is not to be seen."""
    return pc.fill_null(pc.equal(pc.struct_field(_head(batch), "deleted"), _TRUE), _NO)


def _head(batch: pa.RecordBatch) -> pa.StructArray:
    """Return what stands before each record's data; it is looked up once for the sinks of a batch."""
    global _newest
    of, head = _newest
    if of() is not batch:
        head = pc.extract_regex(batch.column("record"), _HEAD)
        _newest = weakref.ref(batch), head
    return head


def _types(batch: pa.RecordBatch, deleted: pa.BooleanArray) -> pa.StringArray:
    """Return the type of each row's event; null where it is none."""
    action = batch.column("action")
    was = pc.fill_null(pc.match_substring_regex(batch.column("changes"), _WAS_DELETED), _NO)
    updates = pc.if_else(
        was,
        pc.if_else(deleted, _DELETED, _INSERTED),
        pc.if_else(deleted, _NO_TYPE, _UPDATED),
    )
    inserts = pc.if_else(deleted, _NO_TYPE, _INSERTED)
    found = pc.if_else(pc.equal(action, _INSERT), inserts, _NO_TYPE)
    found = pc.if_else(pc.equal(action, _READ), _READ, found)
    return pc.if_else(pc.equal(action, _UPDATE), updates, found)


def _names(column: pa.StringArray) -> pa.StringArray:
    """Return the texts of JSON strings; a batch has but a few of them."""
    found = column.dictionary_encode()
    names = [
        orjson.loads(f'"{text}"') if "\\" in text else text for text in found.dictionary.to_pylist()
    ]
    return pa.array(names, pa.string()).take(found.indices)


def _changes(batch: pa.RecordBatch) -> pa.StringArray:
    """Return the prior values of what each update changed; `null` where it is no update."""
    changes = batch.column("changes")
    if changes.null_count == len(changes):
        return pa.repeat(_NULL, len(changes))
    olds = changes.cast(pa.binary()).to_pylist()
    news = batch.column("record").cast(pa.binary()).to_pylist()
    found = [
        b"null" if old is None else prior(old, new) for old, new in zip(olds, news, strict=True)
    ]
    return pa.array(found, pa.binary()).cast(pa.string())


def prior(changes: bytes, record: bytes) -> bytes:
    """Return the old values of an update, those of `data` member by member; both are JSON objects.

    A member that `data` had not before is null.
    """
    try:
        columns = _OBJECT(changes)
        old = columns.get("data")
        columns.pop("payload_hash", None)
        values = {name: bytes(value) for name, value in columns.items()}
        if old is not None:
            # The last of the columns that has members of its own; a string has no bare quote.
            at = record.index(_DATA) + len(_DATA)
            end = record.rindex(b',"payload_hash":')
            values["data"] = _members(_OBJECT(bytes(old)), _OBJECT(record[at:end]))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return changes  # Postgres takes more levels than the parser does
    return _object(values)


def _members(old: dict[str, msgspec.Raw], new: dict[str, msgspec.Raw]) -> bytes:
    changed: dict[str, bytes] = {}
    for name, raw in old.items():
        was, now = bytes(raw), new.pop(name, None)
        if now is None or bytes(now) != was:
            changed[name] = was
    return _object(changed | dict.fromkeys(new, b"null"))


def _object(values: dict[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(orjson.dumps(name) + b":" + value for name, value in values.items())


def _replaced(batch: pa.RecordBatch, **columns: pa.Array) -> pa.RecordBatch:
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else batch.column(field.name)
        for field in batch.schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
