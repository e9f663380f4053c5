"""A transform in SQL: the select list's names with their values in the place of `record`.

What stands alone (`record.price as price`) keeps the JSON that it had, digit by digit; what is computed
comes from Spark. Of `changes` the old values of such columns stay, under their new names. A column
alone whose value the WAL lacks is left out, and named in `metadata.unavailable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import msgspec
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.json_members import Members
from penstock.core.message import TRUNCATE
from penstock.expressions.probes import UNREADABLE
from penstock.expressions.spark.json_texts import json_texts, strings
from penstock.expressions.types import Reference, Type
from penstock.expressions.walk import Json, Walk

# Made once: each conversion of a Python value looks for optional modules, 0.1 ms a time.
_TRUNCATE: Final = pa.scalar(TRUNCATE, pa.string())
_YES: Final = pa.scalar(True, pa.bool_())
_END: Final = pa.scalar("}", pa.string())
_NOTHING: Final = pa.scalar("", pa.string())
_NO_CHANGES: Final = "{}"
_NULL: Final = b"null"
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES: Final = msgspec.json.Decoder(list[str])
_ENCODE: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Item:
    """One name of a select list: a place in the message, or the kind of what Spark computes.

    `column` is the name that Spark's value has among its results.
    """

    name: str
    reference: Reference | None = None
    type: Type | None = None
    column: str = ""


_Row = Sequence[Json | None]
"""The columns that are taken out of one of a message's objects, each as the JSON that it is."""


class Select:
    """Puts records together from what `items` name."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._pieces: list[_Run | _Single] = []
        # The new names of the columns that pass through whole, and of all that comes of a column.
        self._renamed: dict[str, list[str]] = {}
        self._passed: dict[str, list[str]] = {}
        columns: dict[str, dict[str, int]] = {}
        for at, item in enumerate(items):
            label = f"{',' if at else '{'}{_quoted(item.name)}:"
            of = item.reference
            if of is None or of.root == "action":
                self._pieces.append(_Single(label, item))
                continue
            of_root = columns.setdefault(of.root, {})
            place = of_root.setdefault(of.column, len(of_root))
            if of.root == "record":
                self._passed.setdefault(of.column, []).append(item.name)
                if not of.path:
                    self._renamed.setdefault(of.column, []).append(item.name)
                    if not self._pieces or not isinstance(self._pieces[-1], _Run):
                        self._pieces.append(_Run())
                    self._pieces[-1].add(label, place)  # type: ignore[union-attr]  # the last one is a `_Run`
                    continue
            self._pieces.append(_Single(label, item, place))
        self._roots = {root: Members(tuple(names)) for root, names in columns.items()}
        self._changed = Members(tuple(self._renamed))
        self._made = Members([item.name for item in items])

    def __call__(
        self, messages: pa.RecordBatch, results: pa.StructArray | None
    ) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Return the messages with their new records, and the rows that can't be read, with why.

        `results` are what Spark computed, None where all items stand alone. All rows stay; a value that
        there is none of is null.
        """
        unread: dict[int, str] = {}
        rows = {
            root: read.rows(messages.column(root).to_pylist()) for root, read in self._roots.items()
        }
        parts: list[Any] = []
        for piece in self._pieces:
            if isinstance(piece, _Run):
                parts.append(piece(rows["record"]))
            else:
                parts += [piece.label, piece(messages, results, rows, unread)]
        records = pc.binary_join_element_wise(*parts, _END, _NOTHING)
        new = {"record": records, "changes": self._changes(messages.column("changes"))}
        new |= self._without(messages.column("metadata"), records)
        truncates = pc.equal(messages.column("action"), _TRUNCATE)
        if pc.any(truncates).as_py():
            new["record"] = pc.if_else(truncates, messages.column("record"), new["record"])
        arrays = [new.get(name, messages.column(name)) for name in messages.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=messages.schema), unread

    def _without(self, metadata: pa.Array, records: pa.Array) -> dict[str, pa.Array]:
        """Return the columns that change where values are not in the WAL; none where all are."""
        complete = pc.fill_null(pc.ends_with(metadata, '"unavailable":[]}'), _YES)
        if pc.all(complete).as_py():
            return {}
        new_records, new_metadata = records.to_pylist(), metadata.to_pylist()
        for row in pc.indices_nonzero(pc.invert(complete)).to_pylist():
            fields = _OBJECT.decode(new_metadata[row])
            unavailable = _NAMES.decode(fields.get("unavailable", b"[]"))
            lacking = {name for column in unavailable for name in self._passed.get(column, ())}
            made = self._made(new_records[row])
            names = [name for name in made if name in lacking]
            fields["unavailable"] = msgspec.Raw(orjson.dumps(names))
            new_metadata[row] = _ENCODE(fields).decode()
            if lacking:
                new_records[row] = _object((n, raw) for n, raw in made.items() if n not in lacking)
        return {
            "record": pa.array(new_records, pa.string()),
            "metadata": pa.array(new_metadata, pa.string()),
        }

    def _changes(self, changes: pa.Array) -> pa.Array:
        if changes.null_count == len(changes):
            return changes
        found = [
            text if text is None or text == _NO_CHANGES else self.passed(text)
            for text in changes.to_pylist()
        ]
        return pa.array(found, pa.string())

    def passed(self, text: str) -> str:
        """Return an object of a table's columns with those that pass through, by their new names."""
        return _object(
            (name, raw)
            for column, raw in self._changed(text).items()
            for name in self._renamed[column]
        )

    def new_names(self, columns: Sequence[str]) -> list[str]:
        """Return the names that columns have where they pass through."""
        return [name for column in columns for name in self._renamed.get(column, ())]


class _Run:
    """Columns of `record` side by side, which pass through whole: one piece of text a message."""

    def __init__(self) -> None:
        self._template = b""
        self._places: list[int] = []

    def add(self, label: str, place: int) -> None:
        """Add a column, with what stands before its value."""
        self._template += label.encode().replace(b"%", b"%%") + b"%b"
        self._places.append(place)
        self._pick: Callable[[_Row], Any] = itemgetter(*self._places)

    def __call__(self, rows: Sequence[_Row]) -> pa.Array:
        """Return the piece of each row."""
        template, pick = self._template, self._pick
        return _texts(
            [
                template
                % pick([_NULL if raw is None else raw for raw in row] if None in row else row)
                for row in rows
            ]
        )


class _Single:
    """Any other item: a part of a column, a place elsewhere in the message, what Spark computed."""

    def __init__(self, label: str, item: Item, place: int = -1) -> None:
        self.label = pa.scalar(label, pa.string())
        self._item = item
        self._place = place
        path = () if item.reference is None else item.reference.path
        self._walk = Walk(path) if path else None

    def __call__(
        self,
        messages: pa.RecordBatch,
        results: pa.StructArray | None,
        rows: Mapping[str, Sequence[_Row]],
        unread: dict[int, str],
    ) -> pa.Array:
        """Return its JSON in every message; why there is none, in `unread`."""
        reference = self._item.reference
        if reference is None:
            assert results is not None  # noqa: S101 - the plan has what is computed
            assert self._item.type is not None  # noqa: S101 - likewise
            return json_texts(self._item.type, results.field(self._item.column))
        if reference.root == "action":
            return strings(messages.column("action"))
        raws = [row[self._place] for row in rows[reference.root]]
        if self._walk is not None:
            for row, raw in enumerate(raws):
                try:
                    raws[row] = None if raw is None else self._walk(raw)
                except UNREADABLE as error:
                    raws[row] = None
                    unread[row] = f"{reference.column} can't be read: {error}"
        return _texts([_NULL if raw is None else bytes(raw) for raw in raws])


def _texts(values: Sequence[bytes]) -> pa.Array:
    """Return pieces of valid text, which need no second check, as texts."""
    return pa.array(values, pa.binary()).view(pa.string())


def _object(members: Iterable[tuple[str, bytes | None]]) -> str:
    pairs = (f"{_quoted(name)}:{raw.decode()}" for name, raw in members if raw is not None)
    return f"{{{','.join(pairs)}}}"


def _quoted(name: str) -> str:
    return orjson.dumps(name).decode()
