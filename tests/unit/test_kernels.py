"""Kernels give for columns what converters give for values, in every form that Postgres prints."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from penstock.postgres import values
from penstock.postgres.kernels import as_text, join, kernel
from penstock.postgres.values import Converter, array_of

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map(str.encode)
plain_texts = st.text("abé😀 ,{}", max_size=5).map(str.encode)


def printed(moment: datetime) -> str:
    """Return a timestamp as Postgres prints it: a fraction without trailing zeros."""
    text = str(moment)
    return text.rstrip("0") if moment.microsecond else text


odd_stamps = st.sampled_from(
    ["infinity", "-infinity", "0044-03-15 12:00:00.5 BC", "0044-03-15 12:00:00 BC",
     "10000-01-01 00:00:00", "294276-12-31 23:59:59.999999", "0001-01-01 00:00:00"]
)  # fmt: skip
fractions = st.sampled_from([0, 5, 120_000, 127_470, 999_999])
moments = st.builds(lambda at, f: printed(at.replace(microsecond=f)), st.datetimes(), fractions)
whole = st.builds(lambda at: printed(at.replace(microsecond=0)), st.datetimes())
stamps = st.one_of(moments, whole) | odd_stamps
zoned = stamps.map(
    lambda t: t if "inf" in t else f"{t[:-3]}+00 BC" if t.endswith("BC") else f"{t}+00"
)
CASES: list[tuple[str, Converter | None, SearchStrategy[bytes]]] = [
    ("integers", None, st.integers().map(lambda n: b"%d" % n)),
    ("booleans", values.boolean, st.sampled_from([b"t", b"f"])),
    (
        "floats", values.floating,
        st.floats(allow_nan=False, allow_infinity=False).map(repr).map(str.encode)
        | st.sampled_from([b"NaN", b"Infinity", b"-Infinity", b"1e-05", b"-0", b"1e+20"]),
    ),
    ("finite floats", values.floating, st.floats(-9, 9).map(repr).map(str.encode)),
    ("plain", values.plain, st.from_regex(rb"\A[0-9:. -]{0,12}\Z")),
    ("text", values.text, texts),
    ("text without escapes", values.text, plain_texts),
    ("bytes that are no text", values.text, st.binary(max_size=6)),
    ("json", values.json, st.sampled_from([b'{"a": 1.10}', b'{\n"a":\r\n[1, "\\n"]}', b"null"])),
    ("json that is no text", values.json, st.sampled_from([b'"\xff\n"', b"1", b'"\xc3\xa9"'])),
    ("bytea", values.binary, st.binary(max_size=6).map(lambda b: b"\\x" + b.hex().encode())),
    ("timestamps", values.timestamp, stamps.map(str.encode)),
    ("timestamps of seconds", values.timestamp, whole.map(str.encode)),
    ("timestamps of any fraction", values.timestamp, moments.map(str.encode)),
    ("timestamptz", values.timestamptz, zoned.map(str.encode)),
    ("timestamptz of seconds", values.timestamptz, whole.map(lambda t: f"{t}+00".encode())),
    ("timestamptz of any fraction", values.timestamptz, moments.map(lambda t: f"{t}+00".encode())),
    (
        "timestamptz of other zones", values.timestamptz,
        st.sampled_from([b"2024-10-28 21:37:01+02", b"2024-10-28 21:37:01.5+00"]),
    ),
    ("arrays", array_of(values.text), st.sampled_from([b"{}", b'{a,"b\\"",NULL}', b"{{1},{2}}"])),
]  # fmt: skip


@pytest.mark.parametrize(("convert", "printed"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_kernel_is_its_converter(
    convert: Converter | None, printed: SearchStrategy[bytes]
) -> None:
    @given(st.lists(st.none() | printed, max_size=8), st.integers(0, 3), st.booleans())
    def columns(items: list[bytes | None], cut: int, nulls: bool) -> None:
        given_items = items if nulls else [i for i in items if i is not None]
        array = pa.array(given_items, pa.binary())[cut:]
        utf8 = all(_is_text(i) for i in given_items)
        left, found, right = kernel(convert, utf8=utf8)(array)
        expected = [
            b"null" if v is None else v if convert is None else convert(v)
            for v in given_items[cut:]
        ]
        assert [left + v + right for v in found.to_pylist()] == expected

    columns()


def _is_text(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def test_parts_are_joined_row_by_row() -> None:
    array = pa.array([b"x", b"\xc3\xa9", b""], pa.binary())
    assert join(b"<", array, b">").to_pylist() == [b"<x>", b"<\xc3\xa9>", b"<>"]
    assert as_text(array[1:]).to_pylist() == ["é", ""]
