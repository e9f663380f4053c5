"""From text to tokens that sqlglot's parser can take without surprises.

sqlglot reads many dialects and forgives much. Whatever is a matter of names is therefore settled
here, token by token against a list of what is allowed, and put aside: references, types, typed
literals and functions become place-holders, so that the parser is left with operators,
parentheses and `case` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn

from sqlglot import Token, TokenType

from penstock.core.text import nearest
from penstock.expressions.errors import ExpressionError
from penstock.expressions.functions import FUNCTIONS, LACKING
from penstock.expressions.syntax import MAX_DEPTH, TypedLiteral, TypeName
from penstock.expressions.tokens import fold
from penstock.expressions.types import Reference
from penstock.expressions.vocabulary import (
    BEFORE_VALUE,
    HINTS,
    KEYWORDS,
    METADATA,
    NUMBER,
    OPERATORS,
    OTHER_OPERATORS,
    PARAMETERS,
    ROOTS,
    ROOTS_HINT,
    SEPARATORS,
    SIDES,
    SUBQUERY,
    TYPES,
    WORD,
    WORD_HINTS,
)

_ODD_STRINGS: Final = frozenset(t for t in TokenType if t.name.endswith("_STRING"))

_FUNCTIONS_HINT: Final = "; the reference lists the functions, under Expressions"

Frame = Literal["group", "call", "cast", "case", "prefix"]


@dataclass
class Words:
    """An expression's tokens, and what their place-holders stand for."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    names: dict[str, Reference | TypedLiteral] = field(default_factory=dict)
    calls: dict[str, tuple[str, TypeName | None]] = field(default_factory=dict)
    types: list[TypeName] = field(default_factory=list)
    swapped: set[str] = field(default_factory=set)
    """Calls whose first argument is written last: `trim('x' from record.a)`."""
    operators: dict[str, str] = field(default_factory=dict)
    """Operators that the parser sees as `|| key ||`: they bind as `||` does in Postgres."""
    groups: int = 0
    """How many parentheses do nothing but group."""


@dataclass
class _Call:
    """A function whose parenthesis is open, and how many words separated its arguments so far."""

    name: str
    key: str
    separators: int = 0


class Reader:
    """Reads the tokens of one expression into `Words`.

    Args:
        text: The text that the tokens are of.
        tokens: The tokens.
        bare: Whether names are those of columns (`--where`), not of places in a message.
        columns: The columns that bare names are compared with in errors.
    """

    def __init__(
        self, text: str, tokens: list[Token], *, bare: bool = False, columns: Iterable[str] = ()
    ) -> None:
        self._words = Words(text)
        self._text = text
        self._tokens = tokens
        self._at = 0
        self._bare = bare
        self._columns = frozenset(columns)
        self._frames: list[Frame] = []
        self._cast: list[str] = []
        self._calls: list[_Call] = []

    def read(self) -> Words:
        """Return the words; raises `ExpressionError` at the first token that is not allowed."""
        while self._at < len(self._tokens):
            self._step()
        words = self._words
        self._drop_prefixes("")
        ends = (OPERATORS | OTHER_OPERATORS) - {")"}
        if self._source(self._tokens[-1]) in ends or self._frames:
            end = self._tokens[-1].end + 1
            missing = self._frames[-1] if self._frames else None
            expected = {"case": "`end`", None: "a value"}.get(missing, "`)`")
            raise ExpressionError(end + 1, f"it ends where {expected} is expected")
        return words

    def _step(self) -> None:
        token = self._tokens[self._at]
        source = self._source(token)
        if token.token_type in _ODD_STRINGS:
            self._refuse(token, "strings with a prefix or dollar signs are not allowed; write '…'")
        if token.token_type is TokenType.STRING:
            self._string(token, source)
        elif token.token_type is TokenType.IDENTIFIER:
            self._quoted(token, source)
        elif token.token_type is TokenType.NUMBER or (
            source == "." and self._is_type(self._at + 1, TokenType.NUMBER)
        ):
            self._number(token)
        elif source in OPERATORS:
            self._operator(token, source)
        elif source in OTHER_OPERATORS:
            self._other_operator(token, source)
        elif source == "!" and self._source_at(self._at + 1) in ("~", "~*"):
            self._at += 1
            self._other_operator(token, source + self._source_at(self._at))
        elif token.token_type is TokenType.SIMILAR_TO:
            self._drop_prefixes("similar to")
            self._emit(token.token_type, "similar to", token.start, token.end)
            self._at += 1
        elif WORD.match(source):
            self._word(token, fold(source))
        else:
            # sqlglot makes one token of some words that go together, such as `similar to`.
            hint = HINTS.get(source) or WORD_HINTS.get(fold(source.split()[0]), "")
            self._refuse(token, f"{source[:20]!r} is not allowed{hint}")

    # The kinds of tokens

    def _string(self, token: Token, source: str) -> None:
        if source != "'" + token.text.replace("'", "''") + "'":
            self._refuse(token, "this string can't be read; write '…', a quote in it doubled")
        if self._previous(TokenType.STRING):
            self._refuse(token, "two strings side by side; join them by ||")
        self._emit(TokenType.STRING, token.text, token.start, token.end)
        self._at += 1

    def _quoted(self, token: Token, source: str) -> None:
        if source != '"' + token.text.replace('"', '""') + '"' or not token.text:
            self._refuse(token, 'this name can\'t be read; write "…", a quote in it doubled')
        if self._bare:
            self._reference("", self._at)
        else:
            self._unknown(token, token.text)

    def _number(self, token: Token) -> None:
        last = self._tokens[self._at + 1] if self._source(token) == "." else token
        text = self._text[token.start : last.end + 1]
        follower = self._text[last.end + 1 : last.end + 2]
        if not NUMBER.match(text) or follower.isalnum() or follower in ("_", "$", "."):
            self._refuse(token, "this number can't be read; write 1, 1.5 or 1.5e3")
        self._emit(TokenType.NUMBER, text, token.start, last.end)
        self._at += 1 if last is token else 2

    def _operator(self, token: Token, source: str) -> None:
        self._at += 1
        if source == "(":
            self._words.groups += 1 if self._groups() else 0
            self._push("group", token)
        elif source == ")":
            self._close(token)
        elif source == ",":
            if self._source_at(self._at) == ")":
                self._refuse(self._tokens[self._at], "a value is expected after the comma")
        elif source == "::" and self._is_json_literal():
            self._at += 1
            return
        elif source == "::":
            self._emit_token(token)
            self._type_token(token)
            return
        elif source in "+-" and self._is_prefix():
            self._push("prefix", token)
        self._emit_token(token)
        if source not in "+-":
            self._drop_prefixes(source)

    def _other_operator(self, token: Token, source: str) -> None:
        key = f"o{len(self._words.operators)}"
        self._words.operators[key] = source
        self._drop_prefixes(source)
        self._emit(TokenType.DPIPE, "||", token.start, token.end)
        self._emit(TokenType.IDENTIFIER, key, token.start, token.end)
        self._emit(TokenType.DPIPE, "||", token.start, token.end)
        self._at += 1

    def _is_json_literal(self) -> bool:
        """Return whether what follows is the `jsonb` of `@> '…'::jsonb`, which is jsonb anyway."""
        before = self._words.tokens[-3:]
        return (
            fold(self._source_at(self._at)) == "jsonb"
            and len(before) == 3
            and before[2].token_type is TokenType.STRING
            and self._words.operators.get(before[0].text) == "@>"
        )

    def _word(self, token: Token, word: str) -> None:
        after = self._source_at(self._at + 1)
        if self._separator(token, word):
            return
        if not self._bare and word in ROOTS and after == ".":
            self._reference(word, self._at + 2)
        elif not self._bare and word == "action" and after not in (".", "("):
            self._place(Reference("action", ""), token, token)
            self._at += 1
        elif after == "." and not (self._bare and not self._is_call(self._at + 1)):
            self._dotted(token, word)
        elif word in FUNCTIONS and after == "(":
            self._call(token, word)
        elif word == "cast" and after == "(":
            self._call(token, "cast")
        elif word == "as" and self._frames and self._frames[-1] == "cast":
            self._cast_type(token)
        elif word in KEYWORDS and token.text.isascii():
            self._keyword(token, word)
        elif (literal := self._typed_literal()) is not None:
            self._place(literal, token, self._tokens[self._at - 1])
        elif self._bare and after == "." and word in ROOTS and word not in self._columns:
            self._refuse(token, f"write the column alone here, without `{word}.`")
        elif self._bare and after != "(" and word not in SUBQUERY:
            self._reference("", self._at)
        else:
            self._unknown(token, word)

    def _keyword(self, token: Token, word: str) -> None:
        if word == "case":
            self._push("case", token)
        elif word == "end":
            self._drop_prefixes(word)
            if not self._frames or self._frames.pop() != "case":
                self._refuse(token, "`end` without `case`")
        elif word == "not" and self._is_prefix():
            self._push("prefix", token)
        else:
            self._drop_prefixes(word)
        self._emit_token(token)
        self._at += 1

    # Names

    def _reference(self, root: str, at: int) -> None:
        """Read a reference whose column is token `at`."""
        first = self._tokens[self._at]
        if at >= len(self._tokens):
            raise ExpressionError(len(self._text) + 1, f"a column is expected after `{root}.`")
        column = self._part(at, folded=True)
        last = self._tokens[at]
        path: list[str | int] = []
        at += 1
        while at < len(self._tokens):
            source = self._source_at(at)
            if source == ".":
                if at + 1 >= len(self._tokens):
                    raise ExpressionError(len(self._text) + 1, "it ends where a key is expected")
                # A key of JSON is taken as it stands: there case matters.
                path.append(self._part(at + 1, folded=False))
                at += 2
            elif source == "[":
                index = self._source_at(at + 1)
                if not re.fullmatch(r"[0-9]{1,9}", index) or self._source_at(at + 2) != "]":
                    self._refuse(
                        self._tokens[at],
                        "an index is a number from 0 in brackets, and a key is written .key",
                    )
                path.append(int(index))
                at += 3
            else:
                break
            last = self._tokens[at - 1]
        if self._source_at(at) == "(":
            self._refuse(first, "functions are called by their plain names alone")
        if root == "metadata" and column not in METADATA:
            known = nearest(column, METADATA) or "; there are " + ", ".join(METADATA)
            self._refuse(first, f"unknown field metadata.{column}{known}")
        if root == "metadata" and path:
            self._refuse(first, f"metadata.{column} has no parts")
        self._at = at
        self._place(Reference(root, column, tuple(path)), first, last)

    def _part(self, at: int, *, folded: bool) -> str:
        token = self._tokens[at]
        source = self._source(token)
        if token.token_type is TokenType.IDENTIFIER:
            if source != '"' + token.text.replace('"', '""') + '"' or not token.text:
                self._refuse(token, 'this name can\'t be read; write "…", a quote in it doubled')
            return token.text
        if not WORD.match(source):
            hint = "; an index is written [0]" if source.isdecimal() else ""
            self._refuse(token, f"a name is expected here, not {source[:20]!r}{hint}")
        return fold(source) if folded else source

    def _dotted(self, token: Token, word: str) -> None:
        at = self._at
        while self._source_at(at + 1) == "." and at + 2 < len(self._tokens):
            at += 2
        if self._is_call(self._at + 1):
            self._refuse(token, "functions are called by their plain names alone")
        name = self._text[token.start : self._tokens[at].end + 1]
        hint = "" if word in ROOTS else nearest(word, ROOTS)
        if word == "action":
            hint = "; the action is one word: action"
        self._refuse(token, f"unknown name {name[:60]}{hint or ROOTS_HINT}")

    def _unknown(self, token: Token, word: str) -> NoReturn:
        source = self._source(token)[:60]
        if word in SUBQUERY:
            self._refuse(token, f"{source} is not allowed: no subqueries, no arrays")
        if word in WORD_HINTS:
            self._refuse(token, f"{source} is not allowed{WORD_HINTS[word]}")
        if self._source_at(self._at + 1) == "(":
            if word in LACKING:
                self._refuse(token, f"there is no function {source}: {LACKING[word]}")
            known = nearest(word, [*FUNCTIONS, "cast"]) or _FUNCTIONS_HINT
            self._refuse(token, f"unknown function {source}{known}")
        if word in FUNCTIONS or word == "cast":
            self._refuse(token, f"{source} is a function: `(` is expected after it")
        names = [*KEYWORDS, "action"]
        hint = nearest(word, names) or f"; did you mean record.{source}?"
        self._refuse(token, f"unknown name {source}{hint}")

    # Functions and types

    def _call(self, token: Token, name: str) -> None:
        key = f"f_{len(self._words.calls)}"
        self._words.calls[key] = (name, None)
        self._emit(TokenType.VAR, key, token.start, token.end)
        opening = self._tokens[self._at + 1]
        self._push("cast" if name == "cast" else "call", token)
        self._emit_token(opening)
        self._at += 2
        if name == "cast":
            self._cast.append(key)
            return
        self._calls.append(_Call(name, key))
        if name == "trim":
            self._trim(key)
        elif name == "extract":
            self._extract(token)

    def _trim(self, key: str) -> None:
        """Read what `trim(both 'x' from …)` has before its arguments."""
        side = SIDES.get(fold(self._source_at(self._at)))
        self._at += side is not None
        self._at += fold(self._source_at(self._at)) == "from"
        self._words.calls[key] = (side or "btrim", None)

    def _extract(self, call: Token) -> None:
        """Read `year from` as `'year',`."""
        if fold(self._source_at(self._at + 1)) != "from":
            self._refuse(call, "write extract(year from …), or date_part('year', …)")
        unit, separator = self._tokens[self._at : self._at + 2]
        text = unit.text if unit.token_type is TokenType.STRING else fold(self._source(unit))
        self._emit(TokenType.STRING, text, unit.start, unit.end)
        self._emit(TokenType.COMMA, ",", separator.start, separator.end)
        self._at += 2

    def _separator(self, token: Token, word: str) -> bool:
        """Read a word between two arguments as a comma; return whether it is one."""
        frame = next((f for f in reversed(self._frames) if f != "prefix"), None)
        if frame != "call" or word not in SEPARATORS.get(self._calls[-1].name, ()):
            return False
        if word == "from" and fold(self._source_at(self._at - 1)) == "distinct":
            return False
        self._drop_prefixes(word)
        call = self._calls[-1]
        if word == "for" and not call.separators:  # substring(x for 3) starts at 1
            self._emit(TokenType.COMMA, ",", token.start, token.end)
            self._emit(TokenType.NUMBER, "1", token.start, token.end)
        if call.name in ("trim", "position"):
            self._words.swapped.add(call.key)
        call.separators += 1
        self._emit(TokenType.COMMA, ",", token.start, token.end)
        self._at += 1
        return True

    def _cast_type(self, token: Token) -> None:
        self._at += 1
        type_ = self._type(token)
        self._words.calls[self._cast[-1]] = ("cast", type_)
        if self._source_at(self._at) != ")":
            self._refuse(self._tokens[self._at - 1], "`)` is expected after the type of a cast")

    def _type_token(self, token: Token) -> None:
        """Read what follows `::`; to sqlglot it is a varchar whose length is our place-holder."""
        type_ = self._type(token)
        last = self._tokens[self._at - 1]
        self._emit(TokenType.VARCHAR, "varchar", last.start, last.end)
        self._emit(TokenType.L_PAREN, "(", last.start, last.end)
        self._emit(TokenType.NUMBER, str(len(self._words.types)), last.start, last.end)
        self._emit(TokenType.R_PAREN, ")", last.start, last.end)
        self._words.types.append(type_)

    def _type(self, before: Token) -> TypeName:
        if self._at >= len(self._tokens):
            raise ExpressionError(before.end + 2, "a type is expected here")
        token = self._tokens[self._at]
        name, length = self._type_name()
        if not length:
            source = self._source(token)[:40]
            known = nearest(fold(source), TYPES) or "; there are " + ", ".join(
                dict.fromkeys(TYPES.values())
            )
            self._refuse(token, f"unknown type {source}{known}")
        self._at += length
        parameters: list[int] = []
        if self._source_at(self._at) == "(":
            opening = self._tokens[self._at]
            allowed = PARAMETERS.get(name, 0)
            while self._source_at(self._at) in ("(", ","):
                number = self._source_at(self._at + 1)
                if not re.fullmatch(r"[0-9]{1,8}", number) or len(parameters) == allowed:
                    self._refuse(opening, f"{name} takes no such length or precision here")
                parameters.append(int(number))
                self._at += 2
            if self._source_at(self._at) != ")":
                self._refuse(opening, f"the brackets after {name} can't be read")
            self._at += 1
        if self._source_at(self._at) == "[":
            self._refuse(token, "arrays are not allowed as types")
        return TypeName(name, tuple(parameters))

    def _type_name(self) -> tuple[str, int]:
        """Return the canonical name of the type that begins here, and how many tokens it has."""
        words = [fold(self._source_at(self._at + n)) for n in range(4)]
        for length in (4, 3, 2, 1):
            if (name := TYPES.get(" ".join(words[:length]))) is not None:
                return name, length
        return "", 0

    def _typed_literal(self) -> TypedLiteral | None:
        name, length = self._type_name()
        if not length or not self._is_type(self._at + length, TokenType.STRING):
            return None
        token = self._tokens[self._at + length]
        if self._source(token) != "'" + token.text.replace("'", "''") + "'":
            self._refuse(token, "this string can't be read; write '…', a quote in it doubled")
        follower = fold(self._source_at(self._at + length + 1))
        if name == "interval" and follower in ("year", "month", "day", "hour", "minute", "second"):
            self._refuse(token, f"write the unit inside the quotes: interval '1 {follower}'")
        self._at += length + 1
        return TypedLiteral(TypeName(name), token.text)

    # Nesting

    def _push(self, frame: Frame, token: Token) -> None:
        if len(self._frames) >= MAX_DEPTH:
            self._refuse(token, f"it is nested more than {MAX_DEPTH} deep")
        self._frames.append(frame)

    def _close(self, token: Token) -> None:
        self._drop_prefixes(")")
        frame = self._frames.pop() if self._frames else None
        if frame is None or frame == "case":
            self._refuse(token, "`)` without `(`" if frame is None else "`end` is expected here")
        if frame == "call":
            self._calls.pop()
        if frame == "cast":
            key = self._cast.pop()
            if self._words.calls[key][1] is None:
                self._refuse(token, "`as` and a type are expected here: cast(… as numeric)")

    def _drop_prefixes(self, word: str) -> None:
        """Forget the signs and `not` before a value that has ended."""
        while self._frames and self._frames[-1] == "prefix" and word != "(":
            self._frames.pop()

    def _is_prefix(self) -> bool:
        previous = self._words.tokens[-1] if self._words.tokens else None
        if previous is None:
            return True
        word = fold(previous.text)
        if previous.token_type in (TokenType.STRING, TokenType.IDENTIFIER, TokenType.NUMBER):
            return False
        return word in BEFORE_VALUE or (word in OPERATORS and word != ")")

    def _groups(self) -> bool:
        """Tell whether the parenthesis that comes now only groups: it begins no list after `in`."""
        previous = self._words.tokens[-1] if self._words.tokens else None
        return previous is None or previous.token_type is not TokenType.IN

    # Tokens

    def _source(self, token: Token) -> str:
        return self._text[token.start : token.end + 1]

    def _source_at(self, at: int) -> str:
        return self._source(self._tokens[at]) if at < len(self._tokens) else ""

    def _is_type(self, at: int, type_: TokenType) -> bool:
        return at < len(self._tokens) and self._tokens[at].token_type is type_

    def _is_call(self, at: int) -> bool:
        """Tell whether the names that go on with the dot at `at` end with a parenthesis."""
        while self._source_at(at) == ".":
            at += 2
        return self._source_at(at) == "("

    def _previous(self, type_: TokenType) -> bool:
        return bool(self._words.tokens) and self._words.tokens[-1].token_type is type_

    def _place(self, what: Reference | TypedLiteral, first: Token, last: Token) -> None:
        if self._previous(TokenType.IDENTIFIER):
            self._refuse(first, "an operator is expected here")
        key = f"p{len(self._words.names)}"
        self._words.names[key] = what
        self._emit(TokenType.IDENTIFIER, key, first.start, last.end)

    def _emit_token(self, token: Token) -> None:
        self._emit(token.token_type, token.text, token.start, token.end)

    def _emit(self, type_: TokenType, text: str, start: int, end: int) -> None:
        # On one line, so that a column is a position.
        self._words.tokens.append(Token(type_, text, 1, end + 1, start, end))

    def _refuse(self, token: Token, reason: str) -> NoReturn:
        raise ExpressionError(token.start + 1, reason)
