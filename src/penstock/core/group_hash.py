"""The hash of a group: messages with the same one keep their order.

A key is a JSON text, compact and in UTF-8; its hash is that text's XXH3 (64 bits, seed 0), as a signed
integer. Names and values stand in it as `record` spells them.

    ["public","orders",[42]]                    a row's own key, the values as in `record_pks`
    ["public","orders",["customer_id"],[7]]     a group of the columns that the settings name

JSON delimits its values, so two keys share a text only if their values are equal in a message too (as
NULL and a jsonb `null` are). The names keep order 7 and customer 7 apart. An own key has none, so a
renamed column leaves its rows in their groups.

Streams store the hash: after a change of this definition new messages do not wait for the stored ones
of their group.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64_digest, xxh3_64_intdigest

_HALF: Final = 1 << 63
_ALL: Final = 1 << 64
_EMPTY: Final = pa.scalar(b"", pa.binary())


def group_hash(key: bytes) -> int:
    """Return the hash of a key's text, from -2**63 to 2**63 - 1."""
    found = xxh3_64_intdigest(key)
    return found - _ALL if found >= _HALF else found


@lru_cache(maxsize=1024)
def key_start(schema: str, table: str, *names: str) -> bytes:
    """Return what a key has before its array of values; `names` are those of a named group.

    `key_start(…) + values + b"]"` is the key.
    """
    parts = [schema, table, names] if names else [schema, table]
    return orjson.dumps(parts)[:-1] + b","


class GroupKey:
    """Makes the keys of one table's rows.

    Args:
        schema: The table's schema.
        table: Its name.
        positions: Where the key's values stand among a row's.
        names: The columns' names in a named group; none of them in a row's own key.
    """

    __slots__ = ("_parts", "_pick", "_template", "positions")

    def __init__(
        self, schema: str, table: str, positions: Iterable[int], names: Sequence[str] = ()
    ) -> None:
        self.positions = tuple(positions)
        start = key_start(schema, table, *names)
        between = [b","] * (len(self.positions) - 1)
        self._parts = [start + b"[", *between, b"]]"] if self.positions else [start + b"[]]"]
        self._template = b"%b".join([part.replace(b"%", b"%%") for part in self._parts])
        self._pick: Callable[[Sequence[bytes]], Any] = (
            itemgetter(*self.positions) if self.positions else lambda _: ()
        )

    def hash(self, values: Sequence[bytes]) -> int:
        """Return the hash of a row's key; `values` has the JSON of the row's values."""
        # `group_hash`, without a call: the capture does this for every row.
        found = xxh3_64_intdigest(self._template % self._pick(values))
        return found - _ALL if found >= _HALF else found

    def hashes(
        self, columns: Sequence[tuple[bytes, pa.BinaryArray, bytes]], rows: int
    ) -> pa.Int64Array:
        """Return the hashes of many rows' keys.

        A column's JSON values are each of its array, none of them null, between its two texts.
        """
        if not self.positions:
            return pa.repeat(pa.scalar(group_hash(self._template % ()), pa.int64()), rows)
        pieces: list[bytes | pa.BinaryArray] = []
        text = b""
        for part, position in zip(self._parts, self.positions, strict=False):
            left, values, right = columns[position]
            pieces += [text + part + left, values]
            text = right
        pieces.append(text + self._parts[-1])
        scalars = [pa.scalar(p, pa.binary()) if isinstance(p, bytes) else p for p in pieces]
        return _hashes(pc.binary_join_element_wise(*scalars, _EMPTY))


def _hashes(keys: pa.BinaryArray) -> pa.Int64Array:
    digests = array("q", b"".join(map(xxh3_64_digest, keys.to_pylist())))
    if sys.byteorder == "little":  # a digest's first byte is its highest
        digests.byteswap()
    return pa.Array.from_buffers(pa.int64(), len(keys), [None, pa.py_buffer(digests)])
