"""Lower case as Postgres' C.UTF-8 has it: each character by itself, always one for one."""

from __future__ import annotations

from typing import Final

SIGMA: Final = "Σİ"
"""What Python and Java make several characters of, or one that depends on where it stands."""
SMALL_SIGMA: Final = "\u03c3i"
_LOWER: Final = str.maketrans(SIGMA, SMALL_SIGMA)


def lowered(text: str) -> str:
    """Return one text in lower case."""
    return text.translate(_LOWER).lower()
