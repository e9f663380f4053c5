"""Objects of an API as records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.config.providers import FlagDeletes, Incremental, Tombstones
from penstock.syncs.connectors.contract import Record, Unreadable
from penstock.syncs.connectors.cursors import CursorFormat, Value, time_in, time_of
from penstock.syncs.connectors.objects import Fields, excerpt, key_of, scalar

_FALSE: Final = frozenset({b"", b"null", b"false", b'""', b"0", b"[]", b"{}"})


class RecordReader:
    """Reads the key, the times and the deletion of objects.

    `all_deleted`: the objects tell of others, which are deleted.
    """

    def __init__(
        self,
        key: Sequence[str],
        incremental: Incremental | None = None,
        *,
        created_path: str | None = None,
        tombstone: Tombstones | FlagDeletes | None = None,
        exclude_path: str | None = None,
        all_deleted: bool = False,
    ) -> None:
        self._key: Final = tuple(key)
        self._format: Final = CursorFormat(incremental.format) if incremental else None
        self._tombstone: Final = tombstone
        self._all_deleted: Final = all_deleted
        self._flag = b""
        if isinstance(tombstone, FlagDeletes):
            self._flag = msgspec.json.encode(tombstone.value)
        paths = list(key)
        self._cursor_at: Final = _place(paths, incremental.cursor_path if incremental else None)
        self._created_at: Final = _place(paths, created_path)
        self._deleted_at: Final = _place(paths, tombstone.path if tombstone else None)
        self._excluded_at: Final = _place(paths, exclude_path)
        self._fields: Final = Fields(paths)

    def read(self, raw: msgspec.Raw) -> tuple[Record | Unreadable | None, Value | None, str | None]:
        """Return the record, its cursor's value and text; None as a record: it is left out."""
        value: Value | None = None
        text: str | None = None
        try:
            fields = self._fields.read(raw)
            if self._cursor_at is not None and self._format is not None:
                text = scalar(fields[self._cursor_at])
                value = None if not text else self._format.parse(text)
            if self._excluded_at is not None and fields[self._excluded_at] not in _FALSE:
                return None, value, text
            upstream_id = key_of(fields[: len(self._key)], self._key)
            created = None
            if self._created_at is not None:
                created = time_in(scalar(fields[self._created_at]))
        except ValueError as error:
            return Unreadable(str(error), excerpt(raw)), None, None
        deleted = self._all_deleted
        if self._deleted_at is not None:
            mark = fields[self._deleted_at]
            if isinstance(self._tombstone, FlagDeletes):
                deleted = mark == self._flag
            else:
                deleted = mark not in _FALSE
        data = b"" if self._all_deleted else bytes(raw)
        return Record(upstream_id, data, created, time_of(value), deleted), value, text


def _place(paths: list[str], path: str | None) -> int | None:
    if path is None:
        return None
    paths.append(path)
    return len(paths) - 1
