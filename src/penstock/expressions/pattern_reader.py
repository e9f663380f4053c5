"""Reads patterns of `~` and `similar to`; what has no equal in Java raises `ValueError`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from penstock.expressions.pattern_tree import (
    ALL,
    ANY,
    CLASSES,
    END,
    START,
    Chars,
    Choice,
    Edge,
    Item,
    Repeat,
    chars_of,
)

_MAX_DEPTH: Final = 10
_MAX_COPIES: Final = 20
_BOUNDS: Final = re.compile(r"\{([0-9]{1,3})(,([0-9]{1,3})?)?\}")


class Reader:
    """Reads a pattern; `escape` is None for one of `~`."""

    def __init__(self, text: str, *, folded: bool, escape: str | None = None) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._folded = folded
        self._similar = escape is not None
        self._escape = "\\" if escape is None else escape

    def choice(self) -> Choice:
        """Return the whole pattern."""
        if self._text.startswith("***"):
            raise ValueError("a pattern can't begin with ***")
        found = self._choice()
        if self._at < len(self._text):
            raise ValueError("`)` without `(`")
        return found

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _choice(self) -> Choice:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        branches = [self._branch()]
        while self._next() == "|":
            self._at += 1
            branches.append(self._branch())
        self._depth -= 1
        return Choice(tuple(branches))

    def _branch(self) -> tuple[Item, ...]:
        items: list[Item] = []
        while self._next() not in ("", "|", ")"):
            item = self._item()
            items += self._repeated(item)
        return tuple(items)

    def _item(self) -> Item:
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
                return ALL
            return ANY if character == "_" else self._one(character)
        if character == "^":
            return START
        if character == "$":
            return END
        return ANY if character == "." else self._one(character)

    def _escaped(self) -> Item:
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
        if (found := CLASSES.get(character)) is not None:
            return found
        raise ValueError(f"\\{character} is not taken here")

    def _repeated(self, item: Item) -> Sequence[Item]:
        """Return an item as often as the repetition after it asks for."""
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
        if isinstance(item, Repeat):
            raise ValueError("% can't be repeated")
        if isinstance(item, Edge):
            raise ValueError("^ and $ can't be repeated")
        if isinstance(item, Chars):
            return [Repeat(item, least, most)]
        if most is None:
            raise ValueError("a group can't be repeated without end; write (…){0,9}, or […]*")
        if most > _MAX_COPIES:
            raise ValueError(f"a group can be repeated {_MAX_COPIES} times at most")
        return [item] * least + [Repeat(item, 0, 1)] * (most - least)

    def _one(self, character: str) -> Chars:
        return chars_of({character}, folded=self._folded)

    def _set(self) -> Chars:
        negated = self._next() == "^"
        self._at += negated
        members: set[str] = set()
        classes: list[Chars] = []
        first = True
        while first or self._next() != "]":
            first = False
            found = CLASSES.get(self._text[self._at + 1 : self._at + 2])
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
        return chars_of(members, folded=self._folded, negated=negated, classes=classes)

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
