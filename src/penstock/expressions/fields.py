"""Takes the values that expressions need out of messages: a batch in, a struct array out.

Only the columns that are named are decoded. A value that lacks the form that its field asks for (one
of a column whose type has changed, say) is null and marked bad, as is one that is not in the WAL, and a
column that is not in the record though the table has it. Nothing that a message holds raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from penstock.core.json_members import Members
from penstock.core.message import TRUNCATE
from penstock.expressions.array_probes import ask
from penstock.expressions.probes import UNREADABLE
from penstock.expressions.types import UNFIT, Field, Kind
from penstock.expressions.values import arrow, arrow_type
from penstock.expressions.walk import Json, Walk

_YES: Final = pa.scalar(True, pa.bool_())  # made once: a conversion takes 0.1 ms
_NO_BITS: Final = pa.scalar(0, pa.int64())
_BITS: Final = 63
"""Fields whose validity fits into one long; its sign is left alone."""
_DIRECT: Final = {
    ("action", ""): "action",
    ("metadata", "table_schema"): "table_schema",
    ("metadata", "table_name"): "table_name",
    ("metadata", "commit_lsn"): "commit_lsn",
    ("metadata", "commit_idx"): "commit_idx",
    ("metadata", "idempotency_key"): "idempotency_key",
}
"""What has a column of its own in a batch."""
_PLAIN: Final[Any] = str | int | bool | None
_FLOAT: Final[Any] = float | str | None
"""What a value is in a record: as few types as can be distinguished, for a column may be asked for in
several kinds."""


def place(field: int) -> tuple[str, int]:
    """Return where a field is marked bad: the name of a long, and the mask of its bit there."""
    word, bit = divmod(field, _BITS)
    return f"bad{word or ''}", 1 << bit


def names(fields: Sequence[Field]) -> list[str]:
    """Return the names of what an `Extractor` gives: `f0`, `f1` and so on, then `bad` and its like."""
    words = [place(at)[0] for at in range(0, max(len(fields), 1), _BITS)]
    return [*(f"f{at}" for at in range(len(fields))), *words]


def ddl(fields: Sequence[Field]) -> str:
    """Return the Spark type of what an `Extractor` gives."""
    columns = names(fields)
    types = [field.type.spark for field in fields]
    types += ["bigint"] * (len(columns) - len(types))
    return f"struct<{','.join(f'{n}:{t}' for n, t in zip(columns, types, strict=True))}>"


def struct_type(fields: Sequence[Field]) -> pa.StructType:
    """Return the Arrow type of what an `Extractor` gives."""
    columns = names(fields)
    types = [arrow_type(field.type) for field in fields]
    types += [pa.int64()] * (len(columns) - len(types))
    return pa.struct(list(zip(columns, types, strict=True)))


class Extractor:
    """Takes `fields` out of batches of `WIRE_SCHEMA`; called with one, returns a struct array.

    It holds a struct for each message, of the type that `struct_type` returns.
    """

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        self._direct: dict[int, str] = {}
        of: dict[str, list[tuple[int, Field]]] = {}
        for at, field in enumerate(fields):
            column = _DIRECT.get((field.reference.root, field.reference.column))
            if column is None:
                of.setdefault(field.reference.root, []).append((at, field))
            else:
                self._direct[at] = column
        self._roots = {root: _Root(root, wanted) for root, wanted in of.items()}

    def __call__(self, batch: pa.RecordBatch) -> pa.StructArray:
        """Return a struct for each message of a batch."""
        bad: list[tuple[int, int]] = []
        arrays: dict[int, pa.Array] = {
            at: batch.column(name).cast(arrow_type(self._fields[at].type))
            for at, name in self._direct.items()
        }
        for name, root in self._roots.items():
            for at, values in root.values(batch, batch.column(name).to_pylist(), bad):
                arrays[at], unfit = arrow(self._fields[at].type, values)
                bad += [(row, at) for row in unfit]
        if "record" in self._roots:
            bad += self._roots["record"].unavailable(batch.column("metadata"))
        type_ = struct_type(self._fields)
        columns = [arrays[at] for at in range(len(self._fields))]
        columns += _words(bad, batch.num_rows, len(type_) - len(columns))
        return pa.StructArray.from_arrays(columns, fields=list(type_))


@lru_cache(maxsize=64)
def extractor(fields: tuple[Field, ...]) -> Extractor:
    """Return the extractor of some fields; making one takes longer than a small batch does."""
    return Extractor(fields)


def _words(bad: Iterable[tuple[int, int]], rows: int, count: int) -> list[pa.Array]:
    masks: list[dict[int, int]] = [{} for _ in range(count)]
    for row, field in bad:
        word = masks[field // _BITS]
        word[row] = word.get(row, 0) | place(field)[1]
    return [
        pa.array([word.get(row, 0) for row in range(rows)], pa.int64())
        if word
        else pa.repeat(_NO_BITS, rows)
        for word in masks
    ]


class _Root:
    """The fields of `record`, `changes` or `metadata`; one decoder serves the columns of them all."""

    def __init__(self, root: str, fields: Iterable[tuple[int, Field]]) -> None:
        self._columns: dict[str, list[int]] = {}
        self._leaves: dict[int, _Leaf] = {}
        # `changes` has those columns alone that were changed.
        self._absent: Any = UNSET if root == "record" else None
        self._lacking: dict[int, frozenset[tuple[str, str]]] = {}
        for at, field in fields:
            self._columns.setdefault(field.reference.column, []).append(at)
            self._leaves[at] = _Leaf(field)
            self._lacking[at] = frozenset(field.lacking)
        # These are taken as JSON text, and each of their fields takes its value out of that.
        self._raw = {
            name
            for name, of in self._columns.items()
            if any(self._leaves[at].in_json != self._leaves[of[0]].in_json for at in of)
            or any(self._leaves[at].is_raw for at in of)
        }
        self._members = Members(tuple(self._columns))
        self._decode: Callable[[str], Any] = _refuse
        self._make()

    def _make(self) -> None:
        members = [
            (
                f"c{number}",
                msgspec.Raw if name in self._raw else self._leaves[of[0]].in_json,
                self._absent,
            )
            for number, (name, of) in enumerate(self._columns.items())
        ]
        rename = {f"c{number}": name for number, name in enumerate(self._columns)}
        try:
            shape = msgspec.defstruct("Columns", members, rename=rename, gc=False)
        except ValueError:  # a column's name with a quote in it
            shape = msgspec.defstruct("Columns", members, gc=False)
        else:
            self._decode = msgspec.json.Decoder(shape).decode
        self._nothing = shape()

    def values(
        self, batch: pa.RecordBatch, texts: Sequence[str | None], bad: list[tuple[int, int]]
    ) -> Iterator[tuple[int, list[Any]]]:
        """Yield each field's number and values; what can't be read is None, and in `bad`."""
        decode, nothing = self._decode, self._nothing
        by_hand: dict[int, dict[int, Any]] = {}
        odd: set[str] = set()
        tables: list[tuple[str, str] | None] | None = None
        try:
            rows = [nothing if text is None else decode(text) for text in texts]
        except UNREADABLE:
            rows = []
            for row, text in enumerate(texts):
                try:
                    rows.append(nothing if text is None else decode(text))
                except UNREADABLE:
                    rows.append(nothing)
                    by_hand[row] = self._by_hand(text, odd)
        for number, (name, of) in enumerate(self._columns.items()):
            column = [getattr(row, f"c{number}") for row in rows]
            for at in of:
                values = column
                if name in self._raw:
                    values = list(map(self._leaves[at], column))
                if by_hand:
                    values = [by_hand[row][at] if row in by_hand else v
                              for row, v in enumerate(values)]  # fmt: skip
                if name in self._raw or by_hand:
                    bad += [(row, at) for row, value in enumerate(values) if value is UNFIT]
                    values = [None if value is UNFIT else value for value in values]
                if UNSET in values:
                    tables = _tables(batch) if tables is None else tables
                    lacking = self._lacking[at]
                    bad += [
                        (row, at)
                        for row, (value, table) in enumerate(zip(values, tables, strict=True))
                        if value is UNSET and table is not None and table not in lacking
                    ]
                    values = [None if value is UNSET else value for value in values]
                yield at, values
        if odd - self._raw:
            self._raw |= odd
            self._make()

    def _by_hand(self, text: str | None, odd: set[str]) -> dict[int, Any]:
        """Return the values of a record that is not as expected; `odd` gets the columns at fault.

        These are taken as JSON text from the next batch on.
        """
        found: dict[int, Any] = {}
        for name, raw in self._members(text).items():
            of = self._columns[name]
            if raw is not None and not self._leaves[of[0]].takes(raw):
                odd.add(name)
            found |= {at: self._absent if raw is None else self._leaves[at](raw) for at in of}
        return found

    def unavailable(self, metadata: pa.Array) -> Iterator[tuple[int, int]]:
        """Yield row and field of each value that the WAL lacks."""
        complete = pc.fill_null(pc.ends_with(metadata, '"unavailable":[]}'), _YES)
        for row in pc.indices_nonzero(pc.invert(complete)).to_pylist():
            try:
                left_out = _METADATA.decode(metadata[row].as_py()).unavailable
            except UNREADABLE:
                continue
            for name in left_out:
                for at in self._columns.get(name, ()):
                    yield row, at


class _Metadata(msgspec.Struct):
    unavailable: list[str] = []


_METADATA: Final = msgspec.json.Decoder(_Metadata)


class _Leaf:
    """Takes one field's value out of its column's JSON text; called with that, or None for nothing.

    Returns what `values.arrow` takes, or `UNFIT`.
    """

    def __init__(self, field: Field) -> None:
        self.in_json = _FLOAT if field.kind is Kind.FLOAT else _PLAIN
        self._probe = None if field.probe is None else ask(*field.probe)
        self.is_raw = bool(field.reference.path) or field.kind is Kind.JSON or bool(field.probe)
        self._walk = Walk(field.reference.path) if field.reference.path else None
        self._is_text = field.kind in (Kind.TEXT, Kind.JSON, Kind.KEY)
        self._decode = msgspec.json.Decoder(self.in_json).decode

    def takes(self, raw: Json) -> bool:
        """Return whether a column's value is of the type that the record's decoder expects."""
        try:
            self._decode(raw)
        except UNREADABLE:
            return False
        return True

    def __call__(self, raw: Json | UnsetType | None) -> Any:
        if raw is None or isinstance(raw, UnsetType):
            return raw
        try:
            if self._walk is not None and (raw := self._walk(raw)) is None:
                return None
            if self._probe is not None:
                return self._probed(bytes(raw))
            return _text(bytes(raw)) if self._is_text else self._decode(raw)
        except UNREADABLE:
            return UNFIT

    def _probed(self, raw: bytes) -> Any:
        # A message has null for a column that is null, and for JSON's null.
        if self._walk is None and raw == b"null":
            return None
        assert self._probe is not None  # noqa: S101 - for the type checker
        return self._probe(raw)


_TEXT: Final = msgspec.json.Decoder(str)
_QUOTE: Final = ord('"')


def _text(json: bytes) -> Any:
    """Return what `->>` gives of a value: a string without its quotes, other JSON as it stands."""
    if json[0] == _QUOTE:
        text = _TEXT.decode(json)
        # No text in Postgres has this character, so `->>` fails too.
        return UNFIT if "\0" in text else text
    return None if json == b"null" else json.decode()


def _refuse(_: str) -> Any:
    raise msgspec.DecodeError


def _tables(batch: pa.RecordBatch) -> list[tuple[str, str] | None]:
    """Return the table of each message, None for a truncate, which has no columns."""
    names = (batch.column(name).to_pylist() for name in ("table_schema", "table_name", "action"))
    return [None if action == TRUNCATE else (s, t) for s, t, action in zip(*names, strict=True)]
