"""What a message of an outbox looks like: which headers it has, which body, which group it is of.

An outbox's row is `{"id", "dedup_key", "payload", "headers", "created_at", …}`; a message is made of it:

    plain        the payload, just as Postgres has it
    envelope     the row as the message of a change: `record`, `changes`, `action`, `metadata`
    cloudevents  CloudEvents 1.0, structured: one JSON object, the payload in `data`
    debezium     the payload, and the headers of Debezium's outbox event router

All have the publisher's headers: an object's members, in which a list is as many headers of one name,
null none, and any other value than a text its JSON. Names that begin with `Nats-`, in any case, are
JetStream's own: they could purge a stream or break the order, and no publisher may set them. The header
`op` is the publisher's operation: the envelope's action, and Debezium's letter for it.

The message's id, its `Nats-Msg-Id`, begins with the outbox's identity: a stream keeps the messages of
two outboxes apart, whatever keys they give.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import msgspec
import orjson
import pyarrow as pa

from penstock.config.nats import OutboxForm
from penstock.core.json_members import members, text_of
from penstock.core.message import DELETE, INSERT, UPDATE

Refused = tuple[str, str]
"""The code of a dead letter, and its reason."""

_NAME: Final = re.compile(r"[!-9;-~]+\Z")
_LINE_END: Final = re.compile(r"[\r\n\0]")
_RESERVED: Final = "nats-"
_SHOWN: Final = 60
_OF_EVENT: Final = b"\r\nContent-Type: application/cloudevents+json"
_COLUMNS: Final = ("id", "dedup_key", "payload", "headers", "created_at")
_LETTERS: Final = {INSERT: "c", UPDATE: "u", DELETE: "d"}


@dataclass(frozen=True, slots=True)
class OutboxMessages:
    """The messages of a batch: their ids, headers and bodies, and the rows that can't be sent.

    `headers` has them as bytes, a line end before each; None where no message has any. `body` is None
    for the envelope, which the sink makes of all its messages in one way, with `action` and `metadata`.
    """

    key: pa.Array
    headers: pa.Array | None
    body: pa.Array | None
    refused: dict[int, Refused]
    action: pa.Array | None = None
    metadata: pa.Array | None = None


_NOTHING: Final = msgspec.Raw()


class _Row(msgspec.Struct, gc=False):
    id: msgspec.Raw = _NOTHING
    dedup_key: msgspec.Raw = _NOTHING
    payload: msgspec.Raw = _NOTHING
    headers: msgspec.Raw = _NOTHING
    created_at: msgspec.Raw = _NOTHING


_Values = Sequence[bytes | None]
_rows: Final = msgspec.json.Decoder(list[_Row]).decode
_header_values: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list_values: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


OWNER: Final = "Penstock-Pipeline"
"""The header that names the pipeline of a message. A publisher's own of that name is left out."""


def owner_header(pipeline: str) -> bytes:
    """Return the header by which a pipeline knows its messages, a line end before it."""
    return f"\r\n{OWNER}: {pipeline}".encode()


def groups_of(batch: pa.RecordBatch, form: OutboxForm) -> Iterable[tuple[Any, ...]] | None:
    """Return the group of each row of a batch, or None if no two rows share one."""
    if form.group_by == "none" or batch.num_rows < 2:
        return None
    if form.group_by is None:
        return [(0,)] * batch.num_rows
    place, _, name = form.group_by.partition(".")
    column = "payload" if place == "payload" else "headers"
    of_row, of_value = members(column), members(name)
    return [
        (text_of(of_value(of_row(record)[column])[name]) or "",)
        for record in batch.column("record").to_pylist()
    ]


class OutboxFormatter:
    """Makes the messages of batches in one form."""

    def __init__(self, form: OutboxForm) -> None:
        self._form = form
        self._key = b"" if form.key_scope == "stream" else f"{form.identity}:".encode()
        self._id = f"{form.identity}#".encode()
        self._source = orjson.dumps(f"/outbox/{quote(form.name)}")

    def __call__(self, batch: pa.RecordBatch) -> OutboxMessages:
        """Return the messages of the rows of a batch of `WIRE_SCHEMA`."""
        headers: dict[bytes | None, _Headers] = {}  # publishers have few that differ
        keys: list[bytes] = []
        lines: list[bytes] = []
        bodies: list[bytes] = []
        actions: list[str] = []
        refused: dict[int, Refused] = {}
        for at, (number, dedup, payload, raw, created) in enumerate(_values(batch)):
            found = headers.get(raw)
            if found is None:
                found = headers[raw] = _Headers(raw)
            if found.refused is not None:
                refused[at] = found.refused
            given = _bytes(text_of(dedup))
            key = self._key + given if given else self._id + (number or b"")
            if payload is None:
                refused[at] = "no_payload", "the row has no payload: was it changed by hand?"
            line, body = self._message(key, payload or b"null", found, created)
            keys.append(key)
            lines.append(line)
            bodies.append(body)
            actions.append(found.op)
        made = OutboxMessages(
            key=pa.array(keys, pa.binary()),
            headers=pa.array(lines, pa.binary()) if any(lines) else None,
            body=None,
            refused=refused,
        )
        if self._form.format != "envelope":
            return dataclasses.replace(made, body=pa.array(bodies, pa.binary()))
        metadata = pa.array(_metadata(batch, keys), pa.binary())
        return dataclasses.replace(made, action=pa.array(actions, pa.binary()), metadata=metadata)

    def _message(
        self, key: bytes, payload: bytes, headers: _Headers, created: bytes | None
    ) -> tuple[bytes, bytes]:
        if self._form.format == "cloudevents":
            return self._cloud_event(key, payload, headers, created)
        if self._form.format == "debezium":
            return self._routed(key, payload, headers), payload
        return headers.lines, b"" if self._form.format == "envelope" else payload

    def _cloud_event(
        self, key: bytes, payload: bytes, headers: _Headers, created: bytes | None
    ) -> tuple[bytes, bytes]:
        given = headers.given
        kind = given.get("ce-type") or _text_in(payload, "type") or self._form.name
        source = given.get("ce-source")
        parts = [
            b'{"specversion":"1.0","id":',
            orjson.dumps(key.decode()),
            b',"source":',
            orjson.dumps(source) if source else self._source,
            b',"type":',
            orjson.dumps(kind),
        ]
        if subject := given.get("ce-subject"):
            parts += [b',"subject":', orjson.dumps(subject)]
        if created is not None and created != b"null":
            parts += [b',"time":', created]
        parts += [b',"datacontenttype":"application/json","data":', payload, b"}"]
        return headers.of_event, b"".join(parts)

    def _routed(self, key: bytes, payload: bytes, headers: _Headers) -> bytes:
        """Return the headers of Debezium's event router, except those that the publisher gave."""
        given = headers.given
        values: dict[str, str | None] = {"id": key.decode(), "aggregateType": self._form.name}
        values["op"] = _LETTERS[headers.op]
        if "eventtype" not in given:
            values["eventType"] = _text_in(payload, "type")
        if "aggregateid" not in given:
            values["aggregateId"] = _text_in(payload, "aggregate_id", "aggregateId", "id")
        added = [
            f"\r\n{name}: {value}"
            for name, value in values.items()
            if value and (name == "op" or name.lower() not in given) and not _LINE_END.search(value)
        ]
        return headers.without_op + "".join(added).encode()


class _Headers:
    """The headers that a publisher gave, read once for all messages that have the same."""

    def __init__(self, raw: bytes | None) -> None:
        self.given: dict[str, str] = {}  # by their names in lower case
        self.lines = self.without_op = b""
        self.of_event = _OF_EVENT
        self.op = INSERT
        self.refused: Refused | None = None
        if raw is None or raw in (b"{}", b"null"):
            return
        lines: list[bytes] = []
        event: list[bytes] = []
        routed: list[bytes] = []
        for name, value in _pairs(raw):
            self.refused = self.refused or _wrong(name, value)
            lower = name.lower()
            self.given.setdefault(lower, value)
            if lower == OWNER.lower():
                continue  # such as of a message that was forwarded
            line = f"\r\n{name}: {value}".encode()
            lines.append(line)
            if lower != "content-type" and not lower.startswith("ce-"):
                event.append(line)
            if name != "op":
                routed.append(line)
            elif value in _LETTERS:
                self.op = value
        if self.refused is None:
            self.lines, self.without_op = b"".join(lines), b"".join(routed)
            self.of_event = b"".join([*event, _OF_EVENT])


def _pairs(raw: bytes) -> Iterable[tuple[str, str]]:
    """Give names and values of the headers that an object stands for."""
    try:
        found: Mapping[str, msgspec.Raw] = _header_values(raw)
    except (msgspec.MsgspecError, RecursionError):
        yield "", ""  # no object, which is refused as a header without a name
        return
    for name, value in found.items():
        values: list[bytes] = [bytes(value)]
        if values[0][:1] == b"[":
            values = [bytes(item) for item in _list_values(value)]
        for item in values:
            text = text_of(item)
            if text is not None:
                yield name, text


def _wrong(name: str, value: str) -> Refused | None:
    """Return why NATS can't carry a header, if so."""
    if not _NAME.match(name):
        reason = "expected printable ASCII without blanks and ':'"
        return "invalid_header", f"{name[:_SHOWN]!r} is no name of a header: {reason}"
    if name.lower().startswith(_RESERVED):
        return "reserved_header", f"{name[:_SHOWN]!r}: headers named Nats-… are JetStream's own"
    if _LINE_END.search(value):
        return "invalid_header", f"the value of header {name[:_SHOWN]!r} holds a line end"
    return None


def _metadata(batch: pa.RecordBatch, keys: Sequence[bytes]) -> list[bytes]:
    """Return the metadata of a batch's messages, with the ids that they are sent with."""
    captured = batch.column("metadata").cast(pa.binary()).to_pylist()
    known_by = batch.column("idempotency_key").cast(pa.binary()).to_pylist()
    member = b'"idempotency_key":'
    return [
        (text or b"{}").replace(
            b'%b"%b"' % (member, old or b""), member + orjson.dumps(key.decode()), 1
        )
        for text, old, key in zip(captured, known_by, keys, strict=True)
    ]


def _values(batch: pa.RecordBatch) -> Iterable[_Values]:
    """Return of each row the JSON of its members, in the order of `_COLUMNS`."""
    records = batch.column("record").cast(pa.binary()).to_pylist()
    try:
        rows = _rows(b"[%b]" % b",".join(records))
    except (msgspec.MsgspecError, RecursionError, TypeError):
        read = members(*_COLUMNS)  # one of them is not what parsers take
        return [list(read(record).values()) for record in records]
    astuple = msgspec.structs.astuple
    return [[bytes(raw) or None for raw in astuple(row)] for row in rows]


def _text_in(payload: bytes, *names: str) -> str | None:
    """Return the first of these members that a payload has, as a text."""
    found = members(*names)(payload)
    return next((text for name in names if (text := text_of(found[name]))), None)


def _bytes(text: str | None) -> bytes:
    return b"" if text is None else text.encode(errors="replace")
