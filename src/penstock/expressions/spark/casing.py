"""Upper and lower case as Postgres' C.UTF-8 has them: each character by itself, always one for one.

Java, and so Spark, follows the full rules of Unicode: `straße` becomes `STRASSE`, and a capital sigma at
the end of a word `ς`.
"""

from __future__ import annotations

import sys
from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it

from penstock.expressions.casing import SIGMA, SMALL_SIGMA


def _upper(character: str) -> str:
    # Where it is one character, the title case has no more than the simple rule: ᾳ gives ᾼ, ß itself.
    title = character.title()
    return title if len(title) == 1 else character


_ODD: Final = "".join(c for c in map(chr, range(0x80, sys.maxunicode + 1)) if len(c.upper()) > 1)
"""What becomes several characters by the full rules of the upper case; a hundred."""
_UPPER: Final = "".join(map(_upper, _ODD))
_STAND_INS: Final = "".join(chr(0x10FF00 + at) for at in range(len(_ODD)))
"""Characters for private use at the end of Unicode, which have no case."""


def upper(text: Column) -> Column:
    """Return texts in upper case."""
    hidden = F.upper(F.translate(text, _ODD, _STAND_INS))
    return F.when(text.rlike(f"[{_ODD}]"), F.translate(hidden, _STAND_INS, _UPPER)).otherwise(
        F.upper(text)
    )


def lower(text: Column) -> Column:
    """Return texts in lower case."""
    return F.lower(F.translate(text, SIGMA, SMALL_SIGMA))
