"""A cursor over an expression's tokens, and the types that are read from them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

from sqlglot import Token

from penstock.core.tables import fold
from penstock.core.text import nearest
from penstock.expressions.errors import ExpressionError
from penstock.expressions.syntax import MAX_DEPTH, TypedLiteral, TypeName
from penstock.expressions.tokens import Dialect
from penstock.expressions.vocabulary import PARAMETERS, TYPES

_UNITS: Final = frozenset({"year", "month", "day", "hour", "minute", "second"})
_LENGTH: Final = re.compile(r"[0-9]{1,8}")


class Cursor(Dialect.Parser):  # type: ignore[misc, valid-type]  # made by a metaclass
    """sqlglot's parser, with words instead of token types."""

    _nested: int
    """How many parentheses, functions, `case`, signs and `not` are open."""

    @property
    def _start(self) -> int:
        """Where the current token begins, in characters from 1; at the end, where one more would."""
        return int(self._curr.start + 1 if self._curr else self._prev.end + 2)

    @property
    def _word(self) -> str:
        """The current token, folded; empty at the end."""
        return fold(self._source())

    def _source(self, ahead: int = 0) -> str:
        at = self._index + ahead
        if at >= len(self._tokens):
            return ""
        token = self._tokens[at]
        return str(self.sql[token.start : token.end + 1])

    def _take(self, word: str) -> bool:
        found = self._word == word
        if found:
            self._advance()
        return found

    @contextmanager
    def _deeper(self, token: Token) -> Iterator[None]:
        if self._nested >= MAX_DEPTH:
            self._refuse(token, f"it is nested more than {MAX_DEPTH} deep")
        self._nested += 1
        yield
        self._nested -= 1

    def _refuse(self, token: Token, reason: str) -> NoReturn:
        raise ExpressionError(token.start + 1, reason)

    # Types

    def _type(self, *, arrays: bool = False) -> TypeName:
        token = self._curr
        if not token:
            raise ExpressionError(self._start, "a type is expected here")
        name, length = self._type_name()
        if not length:
            source = self._source()[:40]
            types = "; there are " + ", ".join(dict.fromkeys(TYPES.values()))
            self._refuse(token, f"unknown type {source}{nearest(fold(source), TYPES) or types}")
        self._advance(length)
        parameters: list[int] = []
        if self._word == "(":
            opening = self._curr
            while self._word in ("(", ","):
                number = self._source(1)
                if not _LENGTH.fullmatch(number) or len(parameters) == PARAMETERS.get(name, 0):
                    self._refuse(opening, f"{name} takes no such length or precision here")
                parameters.append(int(number))
                self._advance(2)
            if not self._take(")"):
                self._refuse(opening, f"the brackets after {name} can't be read")
        is_array = self._word == "["
        if is_array:
            if not arrays or self._source(1) != "]":
                self._refuse(token, "arrays are not allowed as types but behind array[…] and '{…}'")
            self._advance(2)
        return TypeName(name, tuple(parameters), is_array)

    def _type_name(self) -> tuple[str, int]:
        """Return the canonical name of the type that begins here, and how many tokens it has."""
        words = [fold(self._source(n)) for n in range(4)]
        for length in (4, 3, 2, 1):
            if (name := TYPES.get(" ".join(words[:length]))) is not None:
                return name, length
        return "", 0

    def _typed_literal(self) -> TypedLiteral | None:
        name, length = self._type_name()
        if not length or not self._source(length).startswith("'"):
            return None
        token = self._tokens[self._index + length]
        follower = fold(self._source(length + 1))
        if name == "interval" and follower in _UNITS:
            self._refuse(token, f"write the unit inside the quotes: interval '1 {follower}'")
        self._advance(length + 1)
        return TypedLiteral(TypeName(name), token.text)
