"""Postgres' regular expressions for Java: `~`, `~*` and `similar to`.

A pattern is read into a tree, checked, and written anew. Java tries alternatives one after another, so
that a pattern may take a time that grows with a power of the text's length. Therefore a repetition
keeps what it took where giving it back can't help, groups are not repeated without end, and the power
that is left decides how long a text may be: `Pattern.longest`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

_LAST: Final = 0x10FFFF
_LONGEST: Final = {1: 0, 2: 20_000, 3: 1_000}
"""By the power of the time: how many characters a text may have, 0 for any number."""
_MAX_DEPTH: Final = 10
_MAX_COPIES: Final = 20
_MAX_SIZE: Final = 500
_MAX_WAYS: Final = 10_000
_BOUNDS: Final = re.compile(r"\{([0-9]{1,3})(,([0-9]{1,3})?)?\}")

Ranges = tuple[tuple[int, int], ...]


class Pattern(NamedTuple):
    """A regular expression of Java's that is searched for, and the longest text it is fit for."""

    java: str
    longest: int


@dataclass(frozen=True)
class _Chars:
    """One character. `ranges` has all that it may be, and perhaps more."""

    java: str
    ranges: Ranges


@dataclass(frozen=True)
class _Edge:
    """The start or the end of the text."""

    java: str


@dataclass(frozen=True)
class _Repeat:
    """An item so many times; `most` is None for any number of times."""

    item: _Item
    least: int
    most: int | None


@dataclass(frozen=True)
class _Choice:
    """One of several sequences."""

    branches: tuple[tuple[_Item, ...], ...]


_Item = _Chars | _Edge | _Repeat | _Choice
_START: Final = _Edge("\\A")
_END: Final = _Edge("(?!.)")
_ANY: Final = _Chars(".", ((0, _LAST),))
_ALL: Final = _Repeat(_ANY, 0, None)


def regular(text: str, *, folded: bool = False) -> Pattern:
    """Return what a pattern after `~` is, `folded` after `~*`; raises `ValueError`."""
    return _written(_Reader(text, folded=folded).choice())


def similar(text: str, escape: str | None, *, folded: bool = False) -> Pattern:
    """Return what a pattern after `similar to` is, which a whole text must match.

    `escape` is the character that makes others literal, a backslash if None; raises `ValueError`.
    """
    if escape is not None and len(escape) > 1:
        raise ValueError("`escape` takes one character, or none: ''")
    found = _Reader(text, folded=folded, escape="\\" if escape is None else escape).choice()
    return _written(_Choice(tuple((_START, *branch, _END) for branch in found.branches)))


# Reading


class _Reader:
    """Reads a pattern; `escape` is None for one of `~`."""

    def __init__(self, text: str, *, folded: bool, escape: str | None = None) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._folded = folded
        self._similar = escape is not None
        self._escape = "\\" if escape is None else escape

    def choice(self) -> _Choice:
        """Return the whole pattern."""
        if self._text.startswith("***"):
            raise ValueError("a pattern can't begin with ***")
        found = self._choice()
        if self._at < len(self._text):
            raise ValueError("`)` without `(`")
        return found

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _choice(self) -> _Choice:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        branches = [self._branch()]
        while self._next() == "|":
            self._at += 1
            branches.append(self._branch())
        self._depth -= 1
        return _Choice(tuple(branches))

    def _branch(self) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while self._next() not in ("", "|", ")"):
            item = self._item()
            items += self._repeated(item)
        return tuple(items)

    def _item(self) -> _Item:
        character = self._next()
        self._at += 1
        if character == self._escape:
            return self._escaped()
        if character == "(":
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif self._next() == "?":
                raise ValueError("(?…) is not taken here, but (?:…)")
            found = self._choice()
            if self._next() != ")":
                raise ValueError("`)` is missing")
            self._at += 1
            return found
        if character == "[":
            return self._set()
        if character in "*+?" or (character == "{" and (self._similar or self._next().isdigit())):
            raise ValueError(f"there is nothing before {character} to repeat")
        if self._similar:
            if character == "%":
                return _ALL
            return _ANY if character == "_" else self._one(character)
        if character == "^":
            return _START
        if character == "$":
            return _END
        return _ANY if character == "." else self._one(character)

    def _escaped(self) -> _Item:
        character = self._next()
        self._at += 1
        if not character:
            raise ValueError("it ends with a backslash")
        if not character.isalnum() or (self._similar and character == self._escape):
            return self._one(character)
        if self._similar:
            raise ValueError(f"{self._escape}{character} is not taken here")
        if (control := {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}.get(character)) is not None:
            return self._one(control)
        if (found := _CLASSES.get(character)) is not None:
            return found
        raise ValueError(f"\\{character} is not taken here")

    def _repeated(self, item: _Item) -> list[_Item]:
        """Return an item as often as what follows it says."""
        bounds = _BOUNDS.match(self._text, self._at)
        digit = self._text[self._at + 1 : self._at + 2].isdigit()
        if self._next() == "{" and bounds is None and (self._similar or digit):
            raise ValueError("after { one or two numbers and } are expected")
        if bounds is not None:
            least = int(bounds[1])
            most = least if bounds[2] is None else None if bounds[3] is None else int(bounds[3])
            self._at = bounds.end()
        elif self._next() and self._next() in "*+?":
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._next()]
            self._at += 1
        else:
            return [item]
        if least > 255 or (most or 0) > 255 or (most is not None and most < least):
            raise ValueError("a repetition goes from a number to one that is no less, at most 255")
        if self._next() == "?" and not self._similar:
            self._at += 1  # Which match is found makes no difference to whether there is one.
        if self._next() and (self._next() in "*+?" or _BOUNDS.match(self._text, self._at)):
            raise ValueError("a repetition of a repetition is not taken")
        if isinstance(item, _Edge):
            raise ValueError("^ and $ can't be repeated")
        if isinstance(item, _Chars):
            return [_Repeat(item, least, most)]
        if most is None:
            raise ValueError("a group can't be repeated without end; write (…){0,9}, or […]*")
        if most > _MAX_COPIES:
            raise ValueError(f"a group can be repeated {_MAX_COPIES} times at most")
        return [item] * least + [_Repeat(item, 0, 1)] * (most - least)

    def _one(self, character: str) -> _Chars:
        return _chars({character}, folded=self._folded)

    def _set(self) -> _Chars:
        negated = self._next() == "^"
        self._at += negated
        members: set[str] = set()
        classes: list[_Chars] = []
        first = True
        while first or self._next() != "]":
            first = False
            found = _CLASSES.get(self._text[self._at + 1 : self._at + 2])
            if self._next() == "\\" and found is not None and not self._similar:
                classes.append(found)
                self._at += 2
                continue
            low = self._member()
            high = low
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
            if not low <= high:
                raise ValueError(f"the range {low}-{high} has no characters")
            if ord(high) - ord(low) > 1000 or (self._folded and high > "\x7f" and low != high):
                raise ValueError(f"the range {low}-{high} is not taken here")
            members |= {chr(code) for code in range(ord(low), ord(high) + 1)}
        self._at += 1
        return _chars(members, folded=self._folded, negated=negated, classes=classes)

    def _member(self) -> str:
        character = self._next()
        if not character:
            raise ValueError("`]` is missing")
        self._at += 1
        if character == "[" and self._next() in (":", ".", "=") and self._next():
            raise ValueError("[:…:], [.….] and [=…=] are not taken here; write the characters")
        if character == "\\":
            escaped = self._next()
            self._at += 1
            control = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}.get(escaped)
            if not escaped or (escaped.isalnum() and control is None) or self._similar:
                raise ValueError(f"\\{escaped} is not taken in […]")
            return control or escaped
        return character


def _chars(
    members: set[str], *, folded: bool, negated: bool = False, classes: Sequence[_Chars] = ()
) -> _Chars:
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
        return _Chars(java, ((0, _LAST),) if negated else own)
    return _Chars(java, _others(ranges) if negated else tuple(ranges))


def _simple(changed: str, character: str) -> str:
    return changed if len(changed) == 1 else character


def _code(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


def _others(ranges: Sequence[tuple[int, int]]) -> Ranges:
    found, start = [], 0
    for low, high in ranges:
        if low > start:
            found.append((start, low - 1))
        start = high + 1
    return (*found, (start, _LAST)) if start <= _LAST else tuple(found)


_SPACES: Final = (
    (9, 13), (32, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A),
    (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000),
)  # fmt: skip
_ASCII_WORD: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_WORD: Final = (
    *_ASCII_WORD,
    *((max(low, 0x80), high) for low, high in _others(_SPACES) if high > 0x7F),
)
_CLASSES: Final = {
    "d": _Chars("[0-9]", ((0x30, 0x39),)),
    "D": _Chars("[^0-9]", _others([(0x30, 0x39)])),
    "w": _Chars(r"[\p{IsAlphabetic}0-9_]", _WORD),
    "W": _Chars(r"[^\p{IsAlphabetic}0-9_]", (*_others(_ASCII_WORD), (0x80, _LAST))),
    "s": _Chars(r"\p{IsWhite_Space}", _SPACES),
    "S": _Chars(r"\P{IsWhite_Space}", _others(_SPACES)),
}
"""As in C.UTF-8."""


# Writing


@dataclass(frozen=True)
class _After:
    """What may follow an item: characters, or the end of the whole pattern."""

    ranges: Ranges = ()
    done: bool = True


@dataclass
class _Cost:
    """How often repetitions without end are left that give back, and that do not."""

    giving: int = 0
    keeping: int = 0
    size: int = 0


def _written(choice: _Choice) -> Pattern:
    choice = replace(choice, branches=tuple(map(_trimmed, choice.branches)))
    cost = _Cost()
    java = _item(choice, _After(), cost)
    if cost.size > _MAX_SIZE or _ways(choice) > _MAX_WAYS:
        raise ValueError("it is too long, or has too many alternatives")
    power = cost.giving + bool(cost.keeping)
    if not all(map(_is_anchored, choice.branches)):
        power += 1
    longest = _LONGEST.get(max(1, power))
    if longest is None:
        raise ValueError("it has too many of * and +; begin with ^, or write […]* instead of .*")
    return Pattern(f"(?s){java}", longest)


def _is_anchored(branch: tuple[_Item, ...]) -> bool:
    return bool(branch) and branch[0] is _START


def _trimmed(branch: tuple[_Item, ...]) -> tuple[_Item, ...]:
    """Return a branch without `.*` at its ends: a search finds the rest anywhere."""
    items = _without(list(branch), _START)
    items.reverse()
    return tuple(reversed(_without(items, _END)))


def _without(items: list[_Item], edge: _Edge) -> list[_Item]:
    start = 1 if items[:1] == [edge] else 0
    while items[start : start + 1] == [_ALL]:
        del items[: start + 1]
        start = 0
    return items


def _ways(item: _Item) -> int:
    """Return in how many ways an item may be tried in one place, repetitions without end aside."""
    match item:
        case _Choice():
            return sum(math.prod(map(_ways, branch)) for branch in item.branches)
        case _Repeat() if item.most is not None:
            return item.most - item.least + _ways(item.item)
    return 1


def _item(item: _Item, after: _After, cost: _Cost) -> str:
    """Return an item as Java writes it."""
    cost.size += 1
    match item:
        case _Chars() | _Edge():
            return item.java
        case _Choice():
            return f"(?:{'|'.join(_sequence(branch, after, cost) for branch in item.branches)})"
    if not isinstance(item.item, _Chars):
        return f"{_item(item.item, after, cost)}?"
    count = (
        "*"
        if (item.least, item.most) == (0, None)
        else (f"{{{item.least},{'' if item.most is None else item.most}}}")
    )
    keeps = after.done or not _overlap(item.item.ranges, after.ranges)
    if item.most is None:
        cost.keeping += keeps and not after.done
        cost.giving += not keeps
    return f"{item.item.java}{count}{'+' if keeps else ''}"


def _sequence(items: Sequence[_Item], after: _After, cost: _Cost) -> str:
    written: list[str] = []
    for item in reversed(items):
        written.append(_item(item, after, cost))
        after = _before(item, after)
    return "".join(reversed(written))


def _before(item: _Item, after: _After) -> _After:
    """Return what may follow the item that stands before this one."""
    match item:
        case _Chars():
            return _After(item.ranges, done=False)
        case _Edge():
            # After the end there is nothing; the start says nothing of what comes.
            return _After((), done=False) if item is _END else _After(((0, _LAST),), done=False)
        case _Repeat():
            inner = _before(item.item, after)
            if item.least:
                return inner
            return _After((*inner.ranges, *after.ranges), done=inner.done or after.done)
    ranges: Ranges = ()
    done = False
    for branch in item.branches:
        found = after
        for each in reversed(branch):
            found = _before(each, found)
        ranges, done = (*ranges, *found.ranges), done or found.done
    return _After(ranges, done)


def _overlap(a: Ranges, b: Ranges) -> bool:
    return any(
        low <= other_high and other_low <= high for low, high in a for other_low, other_high in b
    )
