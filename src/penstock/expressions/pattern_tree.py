"""What a pattern is made of: characters, edges, repetitions and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LAST: Final = 0x10FFFF
"""The last character that there is."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chars:
    """One character. `ranges` has all that it may be, and perhaps more."""

    java: str
    ranges: Ranges


@dataclass(frozen=True)
class Edge:
    """The start or the end of the text."""

    java: str


@dataclass(frozen=True)
class Repeat:
    """An item so many times; `most` is None for any number of times."""

    item: Item
    least: int
    most: int | None


@dataclass(frozen=True)
class Choice:
    """One of several sequences."""

    branches: tuple[tuple[Item, ...], ...]


Item = Chars | Edge | Repeat | Choice
START: Final = Edge("\\A")
END: Final = Edge("(?!.)")
ANY: Final = Chars(".", ((0, LAST),))
ALL: Final = Repeat(ANY, 0, None)


def chars_of(
    members: set[str], *, folded: bool, negated: bool = False, classes: Sequence[Chars] = ()
) -> Chars:
    """Return a set of characters, or of all others."""
    if folded:
        members = {each for m in members for each in (_simple(m.lower(), m), _simple(m.upper(), m))}
    codes = sorted(map(ord, members))
    ranges: list[tuple[int, int]] = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = (ranges[-1][0], code)
        else:
            ranges.append((code, code))
    inside = "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in ranges)
    inside += "".join(each.java for each in classes)
    single = len(codes) == 1 and not negated and not classes
    java = inside if single else f"[{'^' if negated else ''}{inside}]"
    if classes:
        # What a class leaves out is not known exactly.
        own = (*ranges, *(pair for each in classes for pair in each.ranges))
        return Chars(java, ((0, LAST),) if negated else own)
    return Chars(java, others(ranges) if negated else tuple(ranges))


def _simple(changed: str, character: str) -> str:
    return changed if len(changed) == 1 else character


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


def others(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return all characters that are in none of some ranges, which stand in order."""
    found, start = [], 0
    for low, high in ranges:
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, LAST)) if start <= LAST else tuple(found)


_SPACES: Final = (
    (9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_ASCII_WORD: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_WORD: Final = (
    *_ASCII_WORD,
    *((max(low, 0x80), high) for low, high in others(_SPACES) if high > 0x7F),
)
CLASSES: Final = {
    "d": Chars("[0-9]", ((0x30, 0x39),)),
    "D": Chars("[^0-9]", others([(0x30, 0x39)])),
    "w": Chars(r"[\p{IsAlphabetic}0-9_]", _WORD),
    "W": Chars(r"[^\p{IsAlphabetic}0-9_]", (*others(_ASCII_WORD), (0x80, LAST))),
    "s": Chars(r"\p{IsWhite_Space}", _SPACES),
    "S": Chars(r"\P{IsWhite_Space}", others(_SPACES)),
}
"""As in C.UTF-8."""
