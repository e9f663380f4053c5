"""What functions of several steps are in Spark: see `functions.py`.

`f` is `pyspark.sql.functions`. Numbers come as Spark's ints; positions count characters from 1.
"""

from __future__ import annotations

from typing import Any, Final

LONGEST: Final = 10_000
"""How many characters `repeat`, `lpad` and `rpad` give at most; a block has 2,000 messages."""
_LAST: Final = (1 << 31) - 1


def substring(f: Any, text: Any, start: Any, count: Any = None) -> Any:
    """Return `substring(text from start for count)`; null where the count is below 0.

    A start below 1 is a position before the text to Postgres, and one from its end to Spark.
    """
    first = f.greatest(start, f.lit(1))
    if count is None:
        found = f.substring(text, first, f.lit(_LAST))
        return f.when(start.isNotNull(), found)
    end = start.cast("bigint") + count.cast("bigint")
    length = f.least(f.greatest(end - first, f.lit(0)), f.lit(_LAST)).cast("int")
    return f.when((count >= 0) & start.isNotNull(), f.substring(text, first, length))


def left(f: Any, text: Any, count: Any) -> Any:
    """Return `left(text, count)`: a count below 0 leaves so many characters out at the end."""
    rest = f.greatest(f.char_length(text).cast("bigint") + count, f.lit(0)).cast("int")
    length = f.when(count >= 0, count).otherwise(rest)
    return f.when(count.isNotNull(), f.substring(text, f.lit(1), length))


def right(f: Any, text: Any, count: Any) -> Any:
    """Return `right(text, count)`: a count below 0 leaves so many characters out at the start."""
    count = count.cast("bigint")
    before = f.char_length(text) - count
    skipped = f.when(count >= 0, f.greatest(before, f.lit(0))).otherwise(-count)
    start = f.least(skipped + 1, f.lit(_LAST)).cast("int")
    return f.when(count.isNotNull(), f.substring(text, start, f.lit(_LAST)))


def split_part(f: Any, text: Any, by: Any, number: Any) -> Any:
    """Return `split_part(text, by, number)`; null for field 0, which there is not."""
    return f.split_part(text, by, f.nullif(number, f.lit(0)))


def repeat(f: Any, text: Any, count: Any) -> Any:
    """Return `repeat(text, count)`; null where it would be longer than `LONGEST`."""
    length = f.char_length(text).cast("bigint") * count.cast("bigint")
    # Within the call, as Spark computes a call of constants whatever stands around it.
    return f.call_function("repeat", text, f.when(length <= LONGEST, count))


def lpad(f: Any, text: Any, length: Any, by: Any = None) -> Any:
    """Return `lpad(text, length, by)`; null where it would be longer than `LONGEST`."""
    return _padded(f, "lpad", text, length, by)


def rpad(f: Any, text: Any, length: Any, by: Any = None) -> Any:
    """Return `rpad(text, length, by)`; null where it would be longer than `LONGEST`."""
    return _padded(f, "rpad", text, length, by)


def _padded(f: Any, name: str, text: Any, length: Any, by: Any) -> Any:
    fill = f.lit(" ") if by is None else by
    fits = f.when((length <= LONGEST) | (fill == ""), length)
    return f.call_function(name, text, fits, fill)


def character(f: Any, code: Any) -> Any:
    """Return `chr(code)`; null for 0, halves of surrogate pairs and what is beyond Unicode."""
    valid = code.between(1, 0xD7FF) | code.between(0xE000, 0x10FFFF)
    digits = f.lpad(f.hex(f.when(valid, code)), 8, "0")
    return f.decode(f.unhex(digits), "UTF-32")
