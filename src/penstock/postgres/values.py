r"""A value as Postgres prints it in text format, turned into its one JSON form. No I/O.

A `Converter` takes the bytes of one value, never NULL, and returns JSON on a single line. The bytes
must come from a session with `TimeZone=UTC`, `DateStyle=ISO`, `IntervalStyle=iso_8601`,
`extra_float_digits=3` and `bytea_output=hex`. A converter raises nothing: a value that it cannot read
(a composite with an attribute added since its type was looked up) becomes a JSON string of the text.
Bytes that are not UTF-8, which only a SQL_ASCII database sends, become `\xe9` in strings and U+FFFD
in json.

The functions run once for every value of every row, so they are short and use built-ins written in C;
the guards are `except` clauses, which cost nothing until an exception is raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Final

import orjson

Converter = Callable[[bytes], bytes]

_dumps = orjson.dumps
_parse_datetime = datetime.fromisoformat


def text(value: bytes) -> bytes:
    """Return a JSON string of any text."""
    try:
        return _dumps(value.decode())
    except UnicodeDecodeError:
        return _dumps(value.decode(errors="backslashreplace"))


def plain(value: bytes) -> bytes:
    """Return a JSON string of text without characters to escape: digits, a date."""
    return b'"%b"' % value


def boolean(value: bytes) -> bytes:
    """Return what the output function prints as `t` and `f`."""
    return b"true" if value == b"t" else b"false" if value == b"f" else text(value)


def floating(value: bytes) -> bytes:
    """Return a float's digits as they are, NaN and the infinities as strings."""
    try:
        # Each form that ends in a digit (`-0`, `1.5`, `1e-05`) is JSON; the others end in a letter.
        return value if value[-1] < 58 else text(value)
    except IndexError:
        return b'""'


def binary(value: bytes) -> bytes:
    r"""Return `\x…` as a JSON string, with the one backslash escaped."""
    return b'"\\%b"' % value if value[:2] == b"\\x" else text(value)


_ONE_LINE: Final = bytes.maketrans(b"\n\r", b"  ")


def json(value: bytes) -> bytes:
    """Return JSON text on one line, otherwise unchanged.

    Line breaks stand only between tokens: Postgres accepts none in a string unless escaped.
    """
    if not value.isascii():
        try:
            value.decode()
        except UnicodeDecodeError:
            value = value.decode(errors="replace").encode()
    return value.translate(_ONE_LINE)


def timestamp(value: bytes) -> bytes:
    """Return `2024-10-28T21:37:01.127470`: no fraction, or six digits of it.

    Infinity, and years outside ISO 8601's plain form (BC, above 9999), stay as printed.
    """
    try:
        return _dumps(_parse_datetime(value.decode()))
    except ValueError:
        return text(value)


# What follows a timestamptz's last digit, by the length of the whole: Postgres prints the fraction
# without trailing zeros.
_UTC_TAIL: Final = {22: b'Z"'} | {24 + n: b"0" * (5 - n) + b'Z"' for n in range(6)}


def timestamptz(value: bytes) -> bytes:
    """Return `timestamp`'s form in UTC with a `Z`, whatever offset the value has."""
    try:
        # A blank at 10 means a year of four digits; the end rules out BC.
        if value[-3:] == b"+00" and value[10] == 32:
            return b'"%b' % value.replace(b" ", b"T").replace(b"+00", _UTC_TAIL[len(value)])
        moment = _parse_datetime(value.decode())
        if moment.tzinfo is None:
            return text(value)
        return _dumps(moment.astimezone(UTC), None, orjson.OPT_UTC_Z)
    except (ValueError, LookupError, OverflowError):
        return text(value)


def vector(value: bytes) -> bytes:
    """Return pgvector's `[1,2,3]`, which is JSON; a string for another type of that name."""
    return value if value.translate(None, b"0123456789,.e+-") == b"[]" else text(value)


# Integers, as `in` raises and catches an exception to find bytes in bytes.
_QUOTE: Final = 34
_BACKSLASH: Final = 92
_QUOTED: Final = rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'


def _unescape(quoted: bytes) -> bytes:
    """Return the text without the backslash before each escaped character."""
    if _BACKSLASH not in quoted:
        return quoted
    if quoted.find(b"\\\\") < 0:
        return quoted.replace(b"\\", b"")
    return b"\\".join([part.replace(b"\\", b"") for part in quoted.split(b"\\\\")])


_PAIR: Final = re.compile(_QUOTED + rb"=>(?:" + _QUOTED + rb"|NULL)(?:, |\Z)", re.DOTALL).match


def hstore(value: bytes) -> bytes:
    """Return `"a"=>"1", "b"=>NULL` as an object of strings and nulls."""
    pairs = []
    end = 0
    while end < len(value):
        pair = _PAIR(value, end)
        if pair is None:
            return text(value)
        key, item = pair.groups()
        pairs.append(
            text(_unescape(key)) + b":" + (b"null" if item is None else text(_unescape(item)))
        )
        end = pair.end()
    return b"{%b}" % b",".join(pairs)


_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")


def integer_array(value: bytes) -> bytes:
    """Return the JSON of an array literal whose elements are JSON."""
    if value[:1] == b"[":  # explicit bounds: `[0:2]={1,2,3}`
        value = value.partition(b"=")[2]
    return value.translate(_BRACKETS).replace(b"NULL", b"null")


def array_of(convert: Converter | None, delimiter: str = ",") -> Converter:
    """Return the converter of arrays whose elements `convert` takes."""
    if convert is None:
        return integer_array
    separator = delimiter.encode()
    # One match for each element, with the braces around it and the delimiter after it: the depth alone
    # decides whether a match may follow.
    element = re.compile(
        rb"(\{*+)(?:%b|([^{}\"\\%b]++))(\}*+)(%b|\Z)"
        % (_QUOTED, re.escape(separator), re.escape(separator)),
        re.DOTALL,
    ).match

    def nested(value: bytes, end: int) -> bytes:
        parts = []
        depth = 0
        more = b","
        while more:
            match = element(value, end)
            if match is None:
                return text(value)
            opened, quoted, bare, closed, more = match.groups()
            end = match.end()
            if quoted is not None:
                item = convert(_unescape(quoted))
            else:
                item = b"null" if bare == b"NULL" else convert(bare)
            if opened or closed or not more:
                inside = depth + len(opened)
                depth = inside - len(closed)
                if inside < 1 or depth < 0 or bool(depth) != bool(more):
                    return text(value)
                item = b"[" * len(opened) + item + b"]" * len(closed)
            elif not depth:
                return text(value)
            parts.append(item)
        return b",".join(parts)

    def array(value: bytes) -> bytes:
        start = value.find(b"=") + 1 if value[:1] == b"[" else 0
        if _QUOTE in value or value.rfind(b"{") != start or value.find(b"}") != len(value) - 1:
            return nested(value, start)
        # One dimension without quotes needs no parser.
        inner = value[start + 1 : -1]
        if not inner:
            return b"[]"
        return b"[%b]" % b",".join(
            [b"null" if item == b"NULL" else convert(item) for item in inner.split(separator)]
        )

    return array


# In a row literal quotes and backslashes are doubled, and NULL is empty.
_FIELD: Final = re.compile(
    rb'(?:"([^"\\]*+(?:(?:""|\\\\)[^"\\]*+)*+)"|([^(),"\\]*+))(?:,|\)\Z)', re.DOTALL
).match


def composite(attributes: Iterable[tuple[str, Converter | None]]) -> Converter:
    """Return the converter of row literals, `(1,"two words",)`, into objects with these keys."""
    columns = [(_dumps(name) + b":", convert) for name, convert in attributes]
    start = 1 if columns else 2

    def row(value: bytes) -> bytes:
        if value[:1] != b"(" or value[-1:] != b")":
            return text(value)
        parts = []
        end = start
        for key, convert in columns:
            field = _FIELD(value, end)
            if field is None:
                return text(value)
            quoted, item = field.groups()
            end = field.end()
            if quoted is not None:
                item = quoted.replace(b'""', b'"').replace(b"\\\\", b"\\")
            elif not item:
                parts.append(key + b"null")
                continue
            parts.append(key + (item if convert is None else convert(item)))
        if end != len(value):
            return text(value)
        return b"{%b}" % b",".join(parts)

    return row
