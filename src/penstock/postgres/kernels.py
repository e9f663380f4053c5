"""Columns of text, as COPY prints them, into columns of JSON: Arrow kernels in place of converters.

A kernel returns exactly what `penstock.postgres.values` returns for each value, for thousands at once.
For a value of a form that a kernel does not know, and for types without one, the converter is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.postgres import values
from penstock.postgres.values import Converter

_NULL: Final = pa.scalar(b"null", pa.binary())
_EMPTY: Final = pa.scalar(b"", pa.binary())


class Values(NamedTuple):
    """JSON values: each of `array`, none of it null, between `left` and `right`."""

    left: bytes
    array: pa.BinaryArray
    right: bytes


Kernel = Callable[[pa.BinaryArray], Values]


class _Unknown(Exception):  # noqa: N818 - never leaves this file
    """A value has a form that only the converter knows."""


def kernel(convert: Converter | None, *, utf8: bool) -> Kernel:
    """Return the kernel that converts columns as `convert` converts values.

    `utf8`: their text is UTF-8 for certain; in a SQL_ASCII database it may not be.
    """
    if convert is None:
        return _raw
    fast = _KERNELS.get(convert)
    if fast is None or not (utf8 or convert not in (values.text, values.json)):
        return _each(convert)
    exact = _each(convert)

    def column(array: pa.BinaryArray) -> Values:
        try:
            return fast(array)
        except _Unknown:
            return exact(array)

    return column


def has_kernel(convert: Converter | None) -> bool:
    """Return whether columns are converted otherwise than value by value."""
    return convert is None or convert in _KERNELS


def join(*parts: bytes | pa.BinaryArray) -> pa.BinaryArray:
    """Return the parts one after the other, row by row; null where one is."""
    scalars = [pa.scalar(p, pa.binary()) if isinstance(p, bytes) else p for p in parts]
    return pc.binary_join_element_wise(*scalars, _EMPTY)


def as_text(array: pa.BinaryArray) -> pa.StringArray:
    """Return bytes that are UTF-8 as text, without checking them again."""
    return pa.Array.from_buffers(
        pa.string(), len(array), array.buffers(), array.null_count, array.offset
    )


def _each(convert: Converter) -> Kernel:
    def column(array: pa.BinaryArray) -> Values:
        converted = [b"null" if v is None else convert(v) for v in array.to_pylist()]
        return Values(b"", pa.array(converted, pa.binary()), b"")

    return column


def _raw(array: pa.BinaryArray) -> Values:
    return Values(b"", pc.fill_null(array, _NULL) if array.null_count else array, b"")


def _between(left: bytes, array: pa.BinaryArray, right: bytes) -> Values:
    if not array.null_count:
        return Values(left, array, right)
    return Values(b"", pc.fill_null(join(left, array, right), _NULL), b"")


def _plain(array: pa.BinaryArray) -> Values:
    return _between(b'"', array, b'"')


_ESCAPED: Final = bytes(range(32)) + b'"\\'


def _text(array: pa.BinaryArray) -> Values:
    if _has_any(_ESCAPED, array):
        raise _Unknown
    return _plain(array)


def _boolean(array: pa.BinaryArray) -> Values:
    words = pc.if_else(pc.equal(array, b"t"), pa.scalar(b"true", pa.binary()), b"false")
    return _raw(words)


_NOT_FINITE: Final = b"Ny"


def _floating(array: pa.BinaryArray) -> Values:
    if _has_any(_NOT_FINITE, array):  # NaN, Infinity
        raise _Unknown
    return _raw(array)


def _binary(array: pa.BinaryArray) -> Values:
    return _between(b'"\\', array, b'"')


def _json(array: pa.BinaryArray) -> Values:
    if _has_any(_BROKEN, array):
        array = _translated(array, _ONE_LINE)
    return _raw(array)


_BROKEN: Final = b"\n\r"
_ONE_LINE: Final = bytes.maketrans(b"\n\r", b"  ")
_T: Final = bytes.maketrans(b" ", b"T")
_ODD: Final = b"Bi"
_SECONDS: Final = len("2024-10-28 21:37:01")
_WHOLE: Final = _SECONDS + len(".127470")


def _timestamp(array: pa.BinaryArray) -> Values:
    return _between(b'"', _iso(array), b'"')


def _timestamptz(array: pa.BinaryArray) -> Values:
    if not pc.all(pc.equal(pc.binary_slice(array, -3), b"+00")).as_py():
        raise _Unknown
    return _between(b'"', _iso(pc.binary_slice(array, 0, -3)), b'Z"')


def _iso(array: pa.BinaryArray) -> pa.BinaryArray:
    """Return timestamps with a T, and their fractions, if any, with six digits."""
    if array.null_count == len(array):
        return array
    sizes = pc.binary_length(array)
    least, most = pc.min_max(sizes).as_py().values()
    # Infinity, BC, years of five digits.
    if least < _SECONDS or most > _WHOLE or _has_any(_ODD, array):
        raise _Unknown
    if not pc.all(pc.equal(pc.binary_slice(array, 4, 5), b"-")).as_py():
        raise _Unknown
    array = _translated(array, _T)
    if most == _SECONDS or least == _WHOLE:
        return array
    text = as_text(array)
    padded = pc.if_else(pc.equal(sizes, _SECONDS), text, pc.ascii_rpad(text, _WHOLE, "0"))
    return padded.cast(pa.binary())


def _has_any(some: bytes, array: pa.BinaryArray) -> bool:
    """Return whether a value has one of these bytes."""
    # A search by a regular expression takes three times as long.
    values = _bytes(array).tobytes()
    return len(values.translate(None, some)) < len(values)


def _bytes(array: pa.BinaryArray) -> memoryview:
    """Return all values of an array, one after the other."""
    _, offsets, data = array.buffers()
    if data is None:
        return memoryview(b"")
    ends = memoryview(offsets).cast("i")
    return memoryview(data)[ends[array.offset] : ends[array.offset + len(array)]]


def _translated(array: pa.BinaryArray, table: bytes) -> pa.BinaryArray:
    """Return an array with each byte replaced by its entry in `table`."""
    validity, offsets, data = array.buffers()
    if data is None:
        return array
    changed = pa.py_buffer(data.to_pybytes().translate(table))
    return pa.Array.from_buffers(
        pa.binary(), len(array), [validity, offsets, changed], array.null_count, array.offset
    )


_KERNELS: Final[dict[Converter, Kernel]] = {
    values.plain: _plain,
    values.text: _text,
    values.boolean: _boolean,
    values.floating: _floating,
    values.binary: _binary,
    values.json: _json,
    values.timestamp: _timestamp,
    values.timestamptz: _timestamptz,
}
