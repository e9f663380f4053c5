r"""Values as tokens of a subject: each is exactly one token, and two different values never share one.

* Space, control characters, `.`, `*`, `>` and `%` become `%XX` (two hexadecimal digits), and so
  does a `$` at the value's start, because subjects that start with `$` belong to the server.
* An empty string becomes `%empty`, null (or a column that the message lacks) `%null`. No escaped
  value can look like these, because there `%` is followed by two hexadecimal digits.

Everything else, `_` and non-ASCII letters included, stays as it is. Values that are not strings are
written as JSON.

`{key}` is one token of all values of `metadata.record_pks`, the primary key, whatever the message's
group is: each value by the rules above, its commas as `%2C`, and a comma between two values. A column
that the WAL lacks is `%null`: those of a delete where the replica identity is another index. A truncate
is `%null`. A row without a key has no identity, so the token is another for each message: `%id-` and
its idempotency key.

Keys of numbers, dates, UUIDs and other texts without a comma, a quote or a backslash are made by Arrow
kernels, with no Python object a row. In batches of 4,096, on two cores, an integer takes 290 ns a
message and a UUID 410, most of it to find `record_pks` in the metadata; the whole frame takes 920 ns
with `{key}` and 520 without. On a busier machine a decimal number took 540 ns and a key of two columns,
one a time, 790. Any other key takes 4.5 µs, and a key in a batch of 16 messages 1.6.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.json_members import members, text_of
from penstock.core.message import TRUNCATE

EMPTY: Final = "%empty"
NULL: Final = "%null"
KEYLESS: Final = "%id-"
"""Begins the token of a row without a key; its idempotency key follows."""

_UNSAFE: Final = re.compile(r"[\x00-\x20\x7f.*>%]|^\$")
_PKS: Final = '"record_pks":['
_BEHIND_PKS: Final = '],"unavailable":['
_END: Final = '],"unavailable":[]}'
_PLAIN: Final = r'(?:-?[0-9][0-9.eE+-]*|"[^\x00-\x1f\x7f$,"\\]+")'
"""A value that is a token once its quotes are gone and `_IN_PLAIN` is escaped."""
_IN_PLAIN: Final = "% .*>"  # `%` first, as the others become one
_PLAIN_KEY: Final = rf"^{_PLAIN}(?:,{_PLAIN})*$"
_is_plain: Final = re.compile(rf"{_PLAIN}(?:,{_PLAIN})*").fullmatch
_TWO: Final = pa.scalar(2, pa.int32())
_list_of: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode


def escape(value: Any) -> str:
    """Return `value` as text that is safe inside a token, by the rules at the top of this file."""
    if value is None:
        return NULL
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    if not text:
        return EMPTY
    return _UNSAFE.sub(lambda found: f"%{ord(found.group()):02X}", text)


def escape_parts(value: Any) -> str:
    """Return `value` with its dots, as tokens of which each is escaped."""
    if value is None:
        return NULL
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return ".".join(map(escape, text.split(".")))


def keys(batch: pa.RecordBatch) -> pa.Array:
    """Return `{key}` of each message of a batch of `WIRE_SCHEMA`, as texts."""
    metadata = batch.column("metadata")
    values = None if metadata.null_count else _values(metadata)
    if values is None:
        return pa.array(few_keys(batch), pa.string())
    plain = pc.match_substring_regex(values, _PLAIN_KEY)
    tokens = pc.replace_substring(values, '"', "")
    if pc.any(pc.match_substring_regex(tokens, f"[{_IN_PLAIN}]")).as_py():
        for char in _IN_PLAIN:
            tokens = pc.replace_substring(tokens, char, f"%{ord(char):02X}")
    others = pc.indices_nonzero(pc.invert(plain))
    if not len(others):
        return tokens
    return pc.replace_with_mask(
        tokens, pc.invert(plain), pa.array(few_keys(batch.take(others)), pa.string())
    )


def few_keys(batch: pa.RecordBatch) -> list[str]:
    """Return what `keys` does, of a few messages."""
    names = ("metadata", "action", "idempotency_key")
    rows = zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    return [_plain_key(metadata) or _key(metadata, action, key) for metadata, action, key in rows]


def _values(metadata: pa.Array) -> pa.Array | None:
    """Return what stands between the brackets of `record_pks`; None where a message's is unusual.

    In a JSON string a quote has a backslash before it, so what is searched for is no part of one. It may
    be part of a key's own JSON, behind the first and before the last place where it stands.
    """
    pieces = pc.split_pattern(metadata, _PKS, max_splits=1)
    if not pc.all(pc.equal(pc.list_value_length(pieces), _TWO)).as_py():
        return None
    rest = pc.list_element(pieces, 1)
    if pc.all(pc.ends_with(rest, _END)).as_py():
        return pc.binary_slice(rest.cast(pa.binary()), 0, -len(_END)).cast(pa.string())
    pieces = pc.split_pattern(rest, _BEHIND_PKS, max_splits=1, reverse=True)
    if not pc.all(pc.equal(pc.list_value_length(pieces), _TWO)).as_py():
        return None
    return pc.list_element(pieces, 0)


def _plain_key(metadata: str | None) -> str | None:
    """Return a key of integers and plain texts, None for any other: that takes longer to read."""
    if metadata is None or (at := metadata.find(_PKS)) < 0:
        return None
    values = metadata[at + len(_PKS) : metadata.rfind(_BEHIND_PKS)]
    return escape(values.replace('"', "")) if _is_plain(values) else None


def _key(metadata: str | None, action: str, idempotency_key: str | None) -> str:
    pks = members("record_pks")(metadata)["record_pks"] or b"[]"
    try:
        values = [text_of(bytes(value)) for value in _list_of(pks)]
    except (
        msgspec.MsgspecError,
        RecursionError,
    ):  # Postgres takes more levels than the parser does
        values = [pks.decode()]
    if values:
        return ",".join([escape(value).replace(",", "%2C") for value in values])
    if action == TRUNCATE:
        return NULL
    return KEYLESS + escape(idempotency_key)
