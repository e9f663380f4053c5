"""What operators stand between: references, literals, calls, casts, `case` and parentheses.

Each name is looked up in a list of what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from sqlglot import Token, TokenType

from penstock.core.tables import fold
from penstock.core.text import nearest
from penstock.expressions.array_literals import of_type
from penstock.expressions.cursor import Cursor
from penstock.expressions.errors import ExpressionError
from penstock.expressions.functions import FUNCTIONS, LACKING
from penstock.expressions.syntax import Expr
from penstock.expressions.tree import Leaf, build
from penstock.expressions.types import Reference
from penstock.expressions.vocabulary import (
    HINTS,
    KEYWORDS,
    METADATA,
    QUANTIFIERS,
    ROOTS,
    ROOTS_HINT,
    SEPARATORS,
    SIDES,
    SUBQUERY,
    WORD,
    WORD_HINTS,
)

CONSTANTS: Final = {"null": ("null", None), "true": ("bool", True), "false": ("bool", False)}

_FUNCTIONS_HINT: Final = "; the reference lists the functions, under Expressions"
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_OPENING: Final = {")": "(", "end": "case"}


class Operands(Cursor):
    """Reads operands; whatever is not of the language is an `ExpressionError`."""

    def _value(self) -> Expr:
        return build(self._parse_disjunction())

    def _parse_type(self, *_: Any, **__: Any) -> Leaf:
        start = self._start
        expr = self._operand()
        while self._word == "::":
            if expr.op in ("any", "all"):
                raise ExpressionError(self._start, f"no cast is taken behind {expr.op}(…)")
            self._advance()
            if self._word == "jsonb" and self._tokens[self._index - 3].text == "@>":
                self._advance()  # what stands there is jsonb anyway
                continue
            type_ = self._type(arrays=expr.op in ("string", "array"))
            if type_.is_array:
                expr = of_type(expr, type_)
            elif expr.op == "array":
                self._refuse(self._prev, f"an array is cast to {type_}[], not to {type_}")
            else:
                expr = Expr("cast", expr.position, (expr,), type_)
        return Leaf(expr=expr, start=start)

    def _operand(self) -> Expr:
        token, source, start = self._curr, self._source(), self._start
        if not token:
            raise ExpressionError(start, "it ends where a value is expected")
        if token.token_type is TokenType.STRING:
            self._advance()
            return Expr("string", start, (), token.text)
        if token.token_type is TokenType.IDENTIFIER:
            self._unknown(token, token.text)
        if source == "." and self._next.token_type is TokenType.NUMBER:
            self._advance()
            source += self._source()
            token = self._curr
        if token.token_type is TokenType.NUMBER:
            self._advance()
            return Expr("number", start, (), source)
        if source == "(":
            with self._parentheses():
                expr = self._value()
                if self._word == ",":
                    raise ExpressionError(expr.position, "this is not allowed here")
            return expr
        if not WORD.match(source):
            self._unexpected()
        return self._named(token, fold(source))

    def _named(self, token: Token, word: str) -> Expr:
        """Return what begins with a word."""
        start, after = token.start + 1, self._source(1)
        if word in ROOTS and after == ".":
            self._advance(2)
            return Expr("reference", start, (), self._reference(token, word))
        if word == "action" and after not in (".", "("):
            self._advance()
            return Expr("reference", start, (), Reference("action", ""))
        if after == ".":
            self._dotted(token, word)
        if word == "cast" and after == "(":
            return self._cast(token)
        if word in FUNCTIONS and after == "(":
            return self._call(token, word)
        if word == "case":
            return self._case(token)
        if word in QUANTIFIERS and after == "(":
            return self._quantified(token, QUANTIFIERS[word])
        if word == "array" and after == "[":
            return self._array(token)
        if word in CONSTANTS:
            self._advance()
            op, value = CONSTANTS[word]
            return Expr(op, start, (), value)
        if word in KEYWORDS:
            self._unexpected()
        literal = self._typed_literal()
        if literal is None:
            self._unknown(token, word)
        return Expr("typed", start, (), literal)

    def _case(self, token: Token) -> Expr:
        args: list[Expr] = []
        with self._deeper(token):
            self._advance()
            subject = None if self._word == "when" else self._value()
            while self._take("when"):
                condition = self._value()
                if subject is not None:
                    condition = Expr("=", condition.position, (subject, condition))
                self._expect("then")
                args += [condition, self._value()]
            if not args:
                self._expect("when")
            start = args[0].position if subject is None else subject.position
            args.append(self._value() if self._take("else") else Expr("null", start))
            self._expect("end")
        return Expr("case", start, tuple(args))

    def _quantified(self, token: Token, word: str) -> Expr:
        """Return `any(…)` or `all(…)`: what stands behind a comparison."""
        self._advance()
        with self._parentheses(token):
            of = build(self._parse_disjunction(), takes=("array",))
        return Expr(word, token.start + 1, (of,))

    def _array(self, token: Token) -> Expr:
        self._advance()
        with self._deeper(token):
            self._expect("[")
            items = [] if self._word == "]" else self._list([self._value()])
            self._expect("]")
        if not items:
            self._refuse(token, "array[] is empty; an empty array is written '{}'")
        return Expr("array", token.start + 1, tuple(items))

    # Names

    def _reference(self, first: Token, root: str) -> Reference:
        """Return the reference whose column comes now."""
        if not self._curr:
            raise ExpressionError(len(self.sql) + 1, f"a column is expected after `{root}.`")
        column = self._part(folded=True)
        path: list[str | int] = []
        while (source := self._word) in (".", "["):
            bracket = self._start
            self._advance()
            if source == ".":
                if not self._curr:
                    raise ExpressionError(len(self.sql) + 1, "it ends where a key is expected")
                # A key of JSON is taken as it stands: there case matters.
                path.append(self._part(folded=False))
                continue
            index = self._source()
            if not _INDEX.fullmatch(index) or self._source(1) != "]":
                reason = "an index is a number from 0 in brackets, and a key is written .key"
                raise ExpressionError(bracket, reason)
            path.append(int(index))
            self._advance(2)
        if self._word == "(":
            self._refuse(first, "functions are called by their plain names alone")
        if root == "metadata" and column not in METADATA:
            known = nearest(column, METADATA) or "; there are " + ", ".join(METADATA)
            self._refuse(first, f"unknown field metadata.{column}{known}")
        if root == "metadata" and path:
            self._refuse(first, f"metadata.{column} has no parts")
        return Reference(root, column, tuple(path))

    def _part(self, *, folded: bool) -> str:
        token, source = self._curr, self._source()
        if token.token_type is not TokenType.IDENTIFIER and not WORD.match(source):
            hint = "; an index is written [0]" if source.isdecimal() else ""
            self._refuse(token, f"a name is expected here, not {source[:20]!r}{hint}")
        self._advance()
        if token.token_type is TokenType.IDENTIFIER:
            return str(token.text)
        return fold(source) if folded else source

    def _dotted(self, token: Token, word: str) -> NoReturn:
        end = token.end + 1
        while self._word and self._source(1) == "." and self._source(2):
            self._advance(2)
            end = self._curr.end + 1
        if self._source(1) == "(":
            self._refuse(token, "functions are called by their plain names alone")
        hint = "" if word in ROOTS else nearest(word, ROOTS)
        if word == "action":
            hint = "; the action is one word: action"
        name = self.sql[token.start : end]
        self._refuse(token, f"unknown name {name[:60]}{hint or ROOTS_HINT}")

    def _unknown(self, token: Token, word: str) -> NoReturn:
        source = self.sql[token.start : token.end + 1][:60]
        if word in SUBQUERY:
            self._refuse(token, f"{source} is not allowed: no subqueries")
        if word in WORD_HINTS:
            self._refuse(token, f"{source} is not allowed{WORD_HINTS[word]}")
        if self._source(1) == "(":
            if word in LACKING:
                self._refuse(token, f"there is no function {source}: {LACKING[word]}")
            known = nearest(word, [*FUNCTIONS, "cast"]) or _FUNCTIONS_HINT
            self._refuse(token, f"unknown function {source}{known}")
        if word in FUNCTIONS or word == "cast":
            self._refuse(token, f"{source} is a function: `(` is expected after it")
        hint = nearest(word, [*KEYWORDS, "action"]) or f"; did you mean record.{source}?"
        self._refuse(token, f"unknown name {source}{hint}")

    # Functions

    def _call(self, token: Token, name: str) -> Expr:
        self._advance()
        with self._parentheses(token):
            called, args = self._arguments(token, name)
        least, most = FUNCTIONS[name].least, FUNCTIONS[name].most
        if not least <= len(args) <= most:
            expected = str(least) if least == most else f"{least} to {most}"
            self._refuse(token, f"{called} takes {expected} arguments, not {len(args)}")
        return Expr(called, token.start + 1, tuple(args))

    def _arguments(self, token: Token, name: str) -> tuple[str, list[Expr]]:
        """Return the arguments, in the order of a plain call, and the function that is called so."""
        if name == "trim":
            side = SIDES.get(self._word)
            self._advance(side is not None)
            self._take("from")
            args = [] if self._word == ")" else [self._value()]
            separated = self._word == "from"
            args = self._list(args, SEPARATORS[name])
            return side or "btrim", args[::-1] if separated else args
        if name == "extract":
            if fold(self._source(1)) != "from":
                self._refuse(token, "write extract(year from …), or date_part('year', …)")
            unit = self._curr
            is_string = unit.token_type is TokenType.STRING
            text = unit.text if is_string else self._word
            self._advance(2)
            return name, self._list([Expr("string", unit.start + 1, (), text), self._value()])
        if self._word == ")":
            return name, []
        if name == "position":
            # No condition is taken before its `in`.
            args = [build(self._parse_bitwise())]
            separated = self._word == "in"
            args = self._list(args, SEPARATORS[name])
            return name, args[::-1] if separated else args
        args = [self._value()]
        if name == "substring" and self._word == "for":  # it starts at 1
            args.append(Expr("number", self._start, (), "1"))
        return name, self._list(args, SEPARATORS.get(name, ()))

    def _list(self, args: list[Expr], separators: Iterable[str] = ()) -> list[Expr]:
        """Return some expressions with those that follow, behind commas or words."""
        while args and (self._word == "," or self._word in separators):
            comma = self._word == ","
            self._advance()
            if comma and self._word == ")":
                raise ExpressionError(self._start, "a value is expected after the comma")
            args.append(self._value())
        return args

    def _cast(self, token: Token) -> Expr:
        self._advance()
        with self._parentheses(token):
            value = self._value()
            if self._word == ")":
                reason = "`as` and a type are expected here: cast(… as numeric)"
                raise ExpressionError(self._start, reason)
            self._expect("as")
            type_ = self._type()
            if self._word != ")":
                self._refuse(self._prev, "`)` is expected after the type of a cast")
        return Expr("cast", token.start + 1, (value,), type_)

    # What is expected

    def _expect(self, word: str) -> None:
        if self._take(word):
            return
        if not self._curr:
            expected = "end" if word in ("when", "then") else word
            raise ExpressionError(self._start, f"it ends where `{expected}` is expected")
        self._leftover(word)

    @contextmanager
    def _parentheses(self, first: Token | None = None) -> Iterator[None]:
        with self._deeper(first or self._curr or self._prev):
            self._expect("(")
            yield
            self._expect(")")

    def _leftover(self, expected: str) -> NoReturn:
        """Refuse what follows an operand where something else is expected."""
        start = self._start
        if expected == "end" and self._word == ")":
            raise ExpressionError(start, "`end` is expected here")
        if self._word not in KEYWORDS and self._source()[0] not in ",[.()":
            self._operand()
            raise ExpressionError(start, "an operator is expected here")
        self._unexpected()

    def _unexpected(self) -> NoReturn:
        source = self._source()[:40]
        reason = f"{source!r} is not expected here"
        if self._word in _OPENING and not self._nested:
            reason = f"`{source}` without `{_OPENING[self._word]}`"
        elif source in HINTS:
            reason = f"{source!r} is not allowed{HINTS[source]}"
        raise ExpressionError(self._start, reason)
