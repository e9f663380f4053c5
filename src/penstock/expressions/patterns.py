"""Postgres' regular expressions for Java: `~`, `~*` and `similar to`.

A pattern is read into a tree, checked, and written anew. Java tries alternatives one after another, so
that a pattern may take a time that grows with a power of the text's length. Therefore a repetition
keeps what it took where giving it back can't help, groups are not repeated without end, and the power
that is left decides how long a text may be: `Pattern.longest`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from penstock.expressions.pattern_reader import Reader
from penstock.expressions.pattern_tree import (
    ALL,
    END,
    LAST,
    START,
    Chars,
    Choice,
    Edge,
    Item,
    Ranges,
    Repeat,
)

_LONGEST: Final = {1: 0, 2: 20_000, 3: 1_000}
"""By the power of the time: how many characters a text may have, 0 for any number."""
_MAX_SIZE: Final = 500
_MAX_WAYS: Final = 10_000


class Pattern(NamedTuple):
    """A regular expression of Java's that is searched for, and the longest text it is fit for."""

    java: str
    longest: int


def regular(text: str, *, folded: bool = False) -> Pattern:
    """Return what a pattern after `~` is, `folded` after `~*`; raises `ValueError`."""
    return _written(Reader(text, folded=folded).choice())


def similar(text: str, escape: str | None, *, folded: bool = False) -> Pattern:
    """Return what a pattern after `similar to` is, which a whole text must match.

    `escape` is the character that makes others literal, a backslash if None; raises `ValueError`.
    """
    if escape is not None and len(escape) > 1:
        raise ValueError("`escape` takes one character, or none: ''")
    found = Reader(text, folded=folded, escape="\\" if escape is None else escape).choice()
    return _written(Choice(tuple((START, *branch, END) for branch in found.branches)))


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


def _written(choice: Choice) -> Pattern:
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


def _is_anchored(branch: tuple[Item, ...]) -> bool:
    return bool(branch) and branch[0] is START


def _trimmed(branch: tuple[Item, ...]) -> tuple[Item, ...]:
    """Return a branch without `.*` at its ends: a search finds the rest anywhere."""
    items = _without(list(branch), START)
    items.reverse()
    return tuple(reversed(_without(items, END)))


def _without(items: list[Item], edge: Edge) -> list[Item]:
    start = 1 if items[:1] == [edge] else 0
    while items[start : start + 1] == [ALL]:
        del items[: start + 1]
        start = 0
    return items


def _ways(item: Item) -> int:
    """Return in how many ways an item may be tried in one place, repetitions without end aside."""
    match item:
        case Choice():
            return sum(math.prod(map(_ways, branch)) for branch in item.branches)
        case Repeat() if item.most is not None:
            return item.most - item.least + _ways(item.item)
    return 1


def _item(item: Item, after: _After, cost: _Cost) -> str:
    """Return an item as Java writes it."""
    cost.size += 1
    match item:
        case Chars() | Edge():
            return item.java
        case Choice():
            return f"(?:{'|'.join(_sequence(branch, after, cost) for branch in item.branches)})"
    if not isinstance(item.item, Chars):
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


def _sequence(items: Sequence[Item], after: _After, cost: _Cost) -> str:
    written: list[str] = []
    for item in reversed(items):
        written.append(_item(item, after, cost))
        after = _before(item, after)
    return "".join(reversed(written))


def _before(item: Item, after: _After) -> _After:
    """Return what may follow the item that stands before this one."""
    match item:
        case Chars():
            return _After(item.ranges, done=False)
        case Edge():
            # After the end comes nothing; after the start anything.
            return _After((), done=False) if item is END else _After(((0, LAST),), done=False)
        case Repeat():
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
