"""LIKE in a time that grows with the text's length times the pattern's, whatever both hold.

Spark makes `.*` of each `%`, which Java tries in every combination: `'%a%a%a%b'` over 300 letters
takes 44 seconds, and no task can be stopped in it. But what lies between two `%` may always be taken
where it is found first, so each search is an atomic group, which is never tried again.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column

from penstock.expressions.casing import lowered
from penstock.expressions.spark import casing

_END: Final = "(?!.)"
r"""The end of a text, which is `\z` to Java and `\Z` to Python."""


def like(text: Column, pattern: str, *, folded: bool = False) -> Column:
    r"""Return whether `text` matches a LIKE pattern, `folded` for ILIKE.

    In `pattern` a backslash stands before each `%`, `_` and backslash that means itself.
    """
    if folded:
        text, pattern = casing.lower(text), lowered(pattern)
    segments = _segments(pattern)
    inner = len(segments) == 3 and not segments[0] and not segments[2]
    if len(segments) <= 2 or inner:
        # One search at the most: Spark knows how to do these without a regular expression.
        return text.like("%".join(segments))
    return text.rlike(like_regex(pattern))


def like_regex(pattern: str) -> str:
    """Return what a text must hold, as Java and Python search for it, to match a pattern of `like`."""
    first, *others = map(_regex, _segments(pattern))
    if not others:
        return f"(?s)\\A{first}{_END}"
    *middle, last = others
    searches = "".join(f"(?>.*?{segment})" for segment in middle)
    return f"(?s)\\A{first}{searches}" + (f".*{last}{_END}" if last else "")


def _segments(pattern: str) -> list[str]:
    """Return what stands between the `%` of a pattern; only the first and the last may be empty."""
    segments = [""]
    characters = iter(pattern)
    for character in characters:
        if character == "%":
            if segments[-1] or len(segments) == 1:
                segments.append("")
        elif character == "\\":
            segments[-1] += character + next(characters)
        else:
            segments[-1] += character
    return segments


def _regex(segment: str) -> str:
    """Return what one segment matches; it has the same length in every text."""
    parts: list[str] = []
    characters = iter(segment)
    for character in characters:
        if character == "_":
            parts.append(".")
            continue
        literal = next(characters) if character == "\\" else character
        plain = literal.isalnum() or ord(literal) > 127
        parts.append(literal if plain else f"\\{literal}")
    return "".join(parts)
