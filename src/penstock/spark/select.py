"""A transform in SQL: the select list's names with their values in the place of `record`.

What stands alone (`record.price as price`) keeps the JSON that it had, digit by digit; what is computed
comes from Spark. Of `changes` the old values of such columns stay, under their new names. A column
alone whose value the WAL does not tell is left out, and named in `metadata.unavailable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import msgspec
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.expressions.fields import UNREADABLE, Json, Walk
from penstock.expressions.types import Reference, Type
from penstock.json_members import Members
from penstock.message import TRUNCATE
from penstock.spark.json_texts import json_texts, strings

# Made once: each conversion of a Python value looks for optional modules, 0.1 ms a time.
_TRUNCATE: Final = pa.scalar(TRUNCATE, pa.string())
_YES: Final = pa.scalar(True, pa.bool_())
_END: Final = pa.scalar("}", pa.string())
_NOTHING: Final = pa.scalar("", pa.string())
_NO_CHANGES: Final = "{}"


@dataclass(frozen=True)
class Item:
    """One name of a select list: a place in the message, or the kind of what Spark computes.

    `column` is the name that Spark's value has among its results.
    """

    name: str
    reference: Reference | None = None
    type: Type | None = None
    column: str = ""


class Select:
    """Puts records together from what `items` name."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = tuple(items)
        self._labels = [
            pa.scalar(f"{',' if at else '{'}{orjson.dumps(item.name).decode()}:", pa.string())
            for at, item in enumerate(items)
        ]
        self._places = {
            root: _Places([(at, i.reference) for at, i in enumerate(items) if _is_in(i, root)])
            for root in ("record", "changes", "metadata")
            if any(_is_in(item, root) for item in items)
        }
        # The new names of the columns that pass through whole.
        self._renamed: dict[str, list[str]] = {}
        self._passed: dict[str, list[int]] = {}
        for at, item in enumerate(items):
            if (of := item.reference) is not None and of.root == "record":
                self._passed.setdefault(of.column, []).append(at)
                if not of.path:
                    self._renamed.setdefault(of.column, []).append(item.name)
        self._changed = _Columns(self._renamed)

    def __call__(
        self, messages: pa.RecordBatch, results: pa.StructArray
    ) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Return the messages with their new records, and the rows that can't be read, with why.

        All rows stay; a value that there is none of is null.
        """
        unread: dict[int, str] = {}
        columns: dict[int, pa.Array] = {}
        for root, places in self._places.items():
            texts = messages.column(root).to_pylist()
            for at, values in places.values(texts, unread):
                columns[at] = pa.array(values, pa.binary()).cast(pa.string())
        for at, item in enumerate(self._items):
            if item.type is not None:
                columns[at] = json_texts(item.type, results.field(item.column))
            elif item.reference is not None and item.reference.root == "action":
                columns[at] = strings(messages.column("action"))
        parts: list[Any] = []
        for at, label in enumerate(self._labels):
            parts += [label, columns[at]]
        records = pc.binary_join_element_wise(*parts, _END, _NOTHING)
        new = {"record": records, "changes": self._changes(messages.column("changes"))}
        new |= self._without(messages, records, columns)
        truncates = pc.equal(messages.column("action"), _TRUNCATE)
        if pc.any(truncates).as_py():
            new["record"] = pc.if_else(truncates, messages.column("record"), new["record"])
        arrays = [new.get(name, messages.column(name)) for name in messages.schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=messages.schema), unread

    def _without(
        self, messages: pa.RecordBatch, records: pa.Array, columns: dict[int, pa.Array]
    ) -> dict[str, pa.Array]:
        """Return the columns that change where values are not in the WAL; none where all are."""
        metadata = messages.column("metadata")
        told = pc.fill_null(pc.match_substring(metadata, '"unavailable":[]'), _YES)
        if pc.all(told).as_py():
            return {}
        new_records, new_metadata = records.to_pylist(), metadata.to_pylist()
        for row in pc.indices_nonzero(pc.invert(told)).to_pylist():
            fields = _OBJECT.decode(new_metadata[row])
            lacking = {
                at
                for column in _NAMES.decode(fields["unavailable"])
                for at in self._passed.get(column, ())
            }
            names = [self._items[at].name for at in sorted(lacking)]
            fields["unavailable"] = msgspec.Raw(orjson.dumps(names))
            new_metadata[row] = _ENCODE(fields).decode()
            if lacking:
                kept = [at for at in columns if at not in lacking]
                pairs = (
                    f"{orjson.dumps(self._items[at].name).decode()}:{columns[at][row].as_py()}"
                    for at in sorted(kept)
                )
                new_records[row] = f"{{{','.join(pairs)}}}"
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
        pairs = (
            f"{orjson.dumps(name).decode()}:{bytes(raw).decode()}"
            for names, raw in zip(self._renamed.values(), self._changed(text), strict=True)
            if raw is not None
            for name in names
        )
        return f"{{{','.join(pairs)}}}"

    def new_names(self, columns: Sequence[str]) -> list[str]:
        """Return the names that columns have where they pass through."""
        return [name for column in columns for name in self._renamed.get(column, ())]


_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES: Final = msgspec.json.Decoder(list[str])
_ENCODE: Final = msgspec.json.Encoder().encode


def _is_in(item: Item, root: str) -> bool:
    return item.reference is not None and item.reference.root == root


class _Columns:
    """Takes some members out of objects, each as the JSON text that it is."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._members = Members(self._names)
        attributes = {f"c{at}": name for at, name in enumerate(self._names)}
        fields = [(attribute, msgspec.Raw, None) for attribute in attributes]
        self._take: Callable[[Any], Any] | None = None
        self._decode: Callable[[str], Any] | None = None
        try:
            shape = msgspec.defstruct("Columns", fields, rename=attributes, gc=False)
        except ValueError:  # a name with a quote in it
            return
        self._decode = msgspec.json.Decoder(shape).decode
        if len(attributes) > 1:
            self._take = attrgetter(*attributes)
        elif attributes:
            self._take = lambda row: (row.c0,)

    def __call__(self, text: str | None) -> Sequence[Json | None]:
        """Return the members in the order of their names, None for one that is not there."""
        if self._take is not None and self._decode is not None and text is not None:
            try:
                found: Sequence[Json | None] = self._take(self._decode(text))
            except UNREADABLE:
                pass
            else:
                return found
        return list(self._members(text).values())

    def all(self, texts: Sequence[str | None]) -> list[Sequence[Json | None]]:
        """Return the members of each object."""
        take, decode = self._take, self._decode
        if take is not None and decode is not None:
            try:
                return [take(decode(text)) for text in texts]  # type: ignore[arg-type]
            except (*UNREADABLE, TypeError):
                pass  # one is none, or takes longer to read
        return list(map(self, texts))


class _Places:
    """The references into one of the message's objects."""

    def __init__(self, references: Iterable[tuple[int, Reference | None]]) -> None:
        self._of: dict[str, list[tuple[int, Walk | None]]] = {}
        for at, reference in references:
            if reference is not None:
                walk = Walk(reference.path) if reference.path else None
                self._of.setdefault(reference.column, []).append((at, walk))
        self._columns = _Columns(self._of)

    def values(
        self, texts: Sequence[str | None], unread: dict[int, str]
    ) -> Iterable[tuple[int, list[bytes]]]:
        """Yield each item's number and its JSON in every message; why there is none, in `unread`."""
        rows = self._columns.all(texts)
        for number, (name, of) in enumerate(self._of.items()):
            raws = [row[number] for row in rows]
            for at, walk in of:
                found = raws
                if walk is not None:
                    found = []
                    for row, raw in enumerate(raws):
                        try:
                            found.append(None if raw is None else walk(raw))
                        except UNREADABLE as error:
                            found.append(None)
                            unread[row] = f"{name} can't be read: {error}"
                yield at, [b"null" if raw is None else bytes(raw) for raw in found]
