"""Upper and lower case as Postgres' C.UTF-8 has them: each character by itself, always one for one.

Java, and so Spark, follows the full rules of Unicode: `straße` becomes `STRASSE`, and a capital sigma at
the end of a word `ς`.
"""

from __future__ import annotations

import sys
from functools import cache

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from penstock.expressions.casing import SIGMA, SMALL_SIGMA


def _upper(character: str) -> str:
    # Where it is one character, the title case has no more than the simple rule: ᾳ gives ᾼ, ß itself.
    title = character.title()
    return title if len(title) == 1 else character


@cache
def _odd() -> str:
    """Return what becomes several characters by the full rules of the upper case; a hundred."""
    return "".join(c for c in map(chr, range(0x80, sys.maxunicode + 1)) if len(c.upper()) > 1)


def upper(text: Column) -> Column:
    """Return texts in upper case."""
    odd = _odd()
    # Characters for private use at the end of Unicode, which have no case.
    stand_ins = "".join(chr(0x10FF00 + at) for at in range(len(odd)))
    hidden = F.upper(F.translate(text, odd, stand_ins))
    # To look for a hundred characters takes 9 µs a text: what is ASCII has none of them.
    ascii_ = F.octet_length(text) == F.char_length(text)
    return (
        F.when(ascii_, F.upper(text))
        .when(text.rlike(f"[{odd}]"), F.translate(hidden, stand_ins, "".join(map(_upper, odd))))
        .otherwise(F.upper(text))
    )


def lower(text: Column) -> Column:
    """Return texts in lower case."""
    return F.lower(F.translate(text, SIGMA, SMALL_SIGMA))
