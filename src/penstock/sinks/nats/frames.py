"""The frames of a batch: `HPUB` with subject, reply, headers and envelope, made by Arrow kernels.

Nothing here is done row by row: a joined column's buffer is what goes to the socket.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.nats import NatsSinkConfig
from penstock.core.json_members import Members, text_of
from penstock.core.message import DELETE, SUBJECT_FIELD
from penstock.core.record_forms import form_of, member_of
from penstock.core.subject import MAX_SUBJECT_BYTES, SUBJECT_RULES, is_subject
from penstock.sinks.nats.few_frames import FEW, MAX_HEADER, FewEncoder, FewFrames
from penstock.sinks.nats.outbox_formats import OutboxFormatter, owner_header

BLOCK_ROWS: Final = 4096
BLOCK_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FrameBlock:
    """The ready-made `HPUB` frames of some neighbouring rows, one after the other."""

    first: int
    rows: int
    data: memoryview
    offsets: memoryview
    payload: Sequence[int]  # header and body of each row, what `max_payload` limits
    largest: int
    refused: dict[int, tuple[str, str]]  # row -> code and reason, found while encoding
    body_bytes: int

    def frame(self, row: int) -> memoryview:
        """Return the frame of one row (counted in the batch)."""
        at = row - self.first
        return self.data[self.offsets[at] : self.offsets[at + 1]]


def _constant(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.binary())


# Made once: each conversion of a Python value looks for optional modules, 0.1 ms a time.
_HPUB: Final = _constant(b"HPUB ")
_SPACE: Final = _constant(b" ")
_NOTHING: Final = _constant(b"")
_NULL: Final = _constant(b"null")
_NO_METADATA: Final = _constant(b"{}")
_EMPTY_METADATA: Final = _constant(b'{"unavailable":[]}')
_CHANGES: Final = _constant(b',"changes":')
_ACTION: Final = _constant(b',"action":"')
_METADATA: Final = _constant(b'","metadata":')
_ROW_METADATA: Final = _constant(b',"metadata":')
_DELETE: Final = _constant(DELETE.encode())
_DELETED: Final = _constant(b',"action":"delete"')
_METADATA_OF: Final = Members(["database"])
_BLANK_LINE: Final = _constant(b"\r\n\r\n")
_LINE_END: Final = _constant(b"\r\n")
_ONE: Final = pa.scalar(1, pa.int64())


@dataclass(frozen=True, slots=True)
class _Texts:
    """What messages are made of, behind the name of the header that has their id."""

    key: pa.Array
    extra: pa.Array | None  # more headers, each with a line end before it
    pieces: list[pa.Array | pa.Scalar]  # from the blank line on
    sized: list[pa.Array]  # those that differ from message to message
    around: int  # bytes of the body that do not
    refused: dict[int, tuple[str, str]]


class Encoder:
    """Makes blocks of frames from a batch, with Arrow kernels: nothing here is done row by row.

    `uuid` is the sink's id in the store; where there is no store, its name stands for it.
    """

    def __init__(
        self,
        config: NatsSinkConfig,
        name: str,
        source: str,
        inbox: bytes,
        uuid: str | None = None,
    ):
        self._template = config.template
        form = form_of(source, config.kind)
        member = b'{"%b":' % member_of(form).encode()
        self._member = _constant(b"\r\n\r\n" + member)
        self._has_changes = form == "changes"
        self._form = None if config.form is None else OutboxFormatter(config.form)
        owner = b"" if config.form is None else owner_header(name)
        self._owner = _constant(owner)
        self._source = source
        consumer = orjson.dumps({"consumer": {"id": uuid or name, "name": name}})
        after_metadata = b"," + consumer[1:] + b"}\r\n"
        expected = f"Nats-Expected-Stream: {config.stream}\r\n" if config.stream else ""
        header = b"\r\nNATS/1.0\r\n" + expected.encode() + b"Nats-Msg-Id: "
        self._header = _constant(header)
        self._after_metadata = _constant(after_metadata)
        self._reply = _constant(b" " + inbox)
        self._few = FewEncoder(b" " + inbox, header, after_metadata, self._has_changes, member)
        # The header begins with the line end of HPUB's own line and ends with an empty line.
        self._header_size = pa.scalar(len(header) - 2 + len(owner) + 4, pa.int32())
        before = member + b',"metadata":'
        if self._has_changes:
            before = b'{"record":,"changes":,"action":"","metadata":'
        self._around = len(before) + len(after_metadata) - 2

    def block(self, batch: pa.RecordBatch, first: int, base: int) -> FrameBlock:
        """Encode as many rows from `first` on as one block takes; `base` numbers the batch."""
        part = batch.slice(first, BLOCK_ROWS)
        if part.num_rows <= FEW and (few := self._few_frames(part, base + first)) is not None:
            return _block(first, few)
        while part.nbytes > BLOCK_BYTES and part.num_rows > 1:
            part = part.slice(0, part.num_rows // 2)
        rows = part.num_rows
        subject = self._subject(part)
        made = self._texts(part)
        key, extra = made.key, made.extra
        header = self._header_sizes(key, extra)
        refused = _refused(
            subject, key, header, first, routed=SUBJECT_FIELD.name in part.schema.names
        )
        refused |= {first + row: why for row, why in made.refused.items()}
        if refused:  # their frames are made, for the dead letter's body, but never sent
            subject, key = _without(subject, refused, first), _without(key, refused, first)
            extra = None if extra is None else _without(extra, refused, first, b"")
            header = self._header_sizes(key, extra)
        payload = pc.add(header, pa.scalar(made.around, pa.int32()))
        for column in made.sized:
            payload = pc.add(payload, pc.binary_length(column))
        numbers = pc.add(
            pc.cumulative_sum(pa.repeat(_ONE, rows)), pa.scalar(base + first - 1, pa.int64())
        )
        # fmt: off - read it as the frame it makes
        frames = pc.binary_join_element_wise(
            _HPUB,
            subject,
            self._reply,
            _digits(numbers),
            _SPACE,
            _digits(header),
            _SPACE,
            _digits(payload),
            self._header,
            key,
            self._owner,
            *(() if extra is None else (extra,)),
            *made.pieces,
            _NOTHING,
        )
        # fmt: on
        _, offsets, data = frames.buffers()
        return FrameBlock(
            first=first,
            rows=rows,
            data=memoryview(data),
            offsets=memoryview(offsets).cast("i")[: rows + 1],
            payload=memoryview(payload.buffers()[1]).cast("i")[:rows],
            largest=pc.max(payload).as_py(),
            refused=refused,
            body_bytes=pc.sum(payload).as_py() - pc.sum(header).as_py(),
        )

    def _header_sizes(self, key: pa.Array, extra: pa.Array | None) -> pa.Array:
        size = pc.add(pc.binary_length(key), self._header_size)
        return size if extra is None else pc.add(size, pc.binary_length(extra))

    def _texts(self, batch: pa.RecordBatch) -> _Texts:
        """Return what the messages of a batch are made of."""
        made = None if self._form is None else self._form(batch)
        if made is None or made.body is None:
            body = self._body(batch)
            if made is not None and made.action is not None and made.metadata is not None:
                body[4] = made.action
                body[6] = _open_object(made.metadata)
        if made is None:
            key, extra, refused = _text(batch, "idempotency_key"), None, {}
        else:
            key, extra, refused = made.key, made.headers, made.refused
        if made is not None and made.body is not None:
            return _Texts(key, extra, [_BLANK_LINE, made.body, _LINE_END], [made.body], 0, refused)
        pieces = [self._member, *body, self._after_metadata]
        return _Texts(key, extra, pieces, body[::2], self._around, refused)

    def _body(self, batch: pa.RecordBatch) -> list[pa.Array | pa.Scalar]:
        """Return the columns of the messages and, in turn, what stands between them."""
        record = _text(batch, "record")
        metadata = _open_object(_text(batch, "metadata", _NO_METADATA))
        if not self._has_changes:
            is_delete = pc.equal(_text(batch, "action"), _DELETE)
            deleted = pc.if_else(is_delete, _DELETED, _NOTHING)
            return [record, _NOTHING, deleted, _ROW_METADATA, metadata]
        changes, action = _text(batch, "changes"), _text(batch, "action")
        return [record, _CHANGES, changes, _ACTION, action, _METADATA, metadata]

    def _subject(self, batch: pa.RecordBatch) -> pa.Array:
        """Return each row's subject: that of its column `subject`, or else the template's."""
        own = None
        if SUBJECT_FIELD.name in batch.schema.names:
            own = batch.column(SUBJECT_FIELD.name).cast(pa.binary())
            if not own.null_count:
                return own
        text = self._template.render(batch, source=self._source, database=self._database(batch))
        return text if own is None else pc.coalesce(own, text)

    def _few_frames(self, part: pa.RecordBatch, base: int) -> FewFrames | None:
        if self._form is not None or SUBJECT_FIELD.name in part.schema.names:
            return None
        subjects = self._template.render_few(
            part, source=self._source, database=self._database(part)
        )
        return self._few(part, subjects, base)

    def _database(self, batch: pa.RecordBatch) -> str | None:
        """Return the source's database, which is the same in all its messages."""
        if "database" not in self._template.variables:
            return None
        return text_of(_METADATA_OF(batch.column("metadata")[0].as_py())["database"])


def _block(first: int, few: FewFrames) -> FrameBlock:
    return FrameBlock(
        first=first,
        rows=len(few.frames),
        data=memoryview(b"".join(few.frames)),
        offsets=memoryview(array("i", accumulate(map(len, few.frames), initial=0))),
        payload=few.payload,
        largest=max(few.payload, default=0),
        refused={},
        body_bytes=few.body_bytes,
    )


def _text(batch: pa.RecordBatch, name: str, null: pa.Scalar = _NULL) -> pa.Array:
    column = batch.column(name)
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.binary())
    return pc.fill_null(column, null) if column.null_count else column


def _digits(numbers: pa.Array) -> pa.Array:
    return numbers.cast(pa.string()).cast(pa.binary())


def _open_object(column: pa.Array) -> pa.Array:
    """Take the closing brace from JSON objects, so that one more member can follow."""
    if not pc.all(pc.ends_with(column, "}")).as_py():
        column = pc.utf8_trim_whitespace(column.cast(pa.string())).cast(pa.binary())
    size = pc.binary_length(column)
    if pc.min(size).as_py() < 3:
        column = pc.if_else(pc.less(size, 3), _EMPTY_METADATA, column)
    return pc.binary_slice(column, 0, -1)


def _refused(
    subject: pa.Array, key: pa.Array, header: pa.Array, first: int, *, routed: bool
) -> dict[int, tuple[str, str]]:
    """Return the rows that no server could take, with code and reason."""
    refused: dict[int, tuple[str, str]] = {}
    size = pc.binary_length(subject)
    if pc.max(size).as_py() > MAX_SUBJECT_BYTES:
        for row, length in enumerate(size.to_pylist(), first):
            if length > MAX_SUBJECT_BYTES:
                reason = f"a subject of {length} bytes; at most {MAX_SUBJECT_BYTES} can be sent"
                refused[row] = "subject_too_long", reason
    # What a template gives is a subject by its making.
    if routed and not pc.all(valid := is_subject(subject)).as_py():
        texts = zip(subject.to_pylist(), valid.to_pylist(), strict=True)
        for row, (text, is_valid) in enumerate(texts, first):
            if not is_valid and row not in refused:
                reason = f"{text.decode(errors='replace')!r} is no subject to publish to"
                refused[row] = "bad_subject", f"{reason}: {SUBJECT_RULES}"
    if pc.max(header).as_py() > MAX_HEADER:
        for row, length in enumerate(header.to_pylist(), first):
            if length > MAX_HEADER:
                reason = f"headers of {length} bytes, the message's id in them; JetStream takes"
                refused[row] = "headers_too_large", f"{reason} {MAX_HEADER}"
    # A line end in the key would end the header that carries it.
    broken = pc.or_(pc.match_substring(key, "\r"), pc.match_substring(key, "\n"))
    if pc.any(broken).as_py():
        for row, is_broken in enumerate(broken.to_pylist(), first):
            if is_broken:
                refused[row] = "invalid_key", "the message's id holds a line end"
    return refused


def _without(column: pa.Array, rows: Iterable[int], first: int, value: bytes = b"-") -> pa.Array:
    values = column.to_pylist()
    for row in rows:
        values[row - first] = value
    return pa.array(values, pa.binary())
