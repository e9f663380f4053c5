"""From text to sqlglot's tokens, and the first refusals: size, strange characters, comments, strings."""

from __future__ import annotations

import re
from typing import ClassVar, Final, NoReturn

from sqlglot import Token, TokenType
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import SqlglotError

from penstock.core.tables import fold
from penstock.expressions.errors import ExpressionError
from penstock.expressions.syntax import MAX_CHARACTERS
from penstock.expressions.vocabulary import (
    HINTS,
    KEYWORDS,
    NUMBER,
    OPERATORS,
    OTHER_OPERATORS,
    WORD,
)

_STRANGE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_COMMENT: Final = re.compile(r"--|/\*")
_FOLLOWER: Final = re.compile(r"[\w$.]")
_WORDS: Final = KEYWORDS | {"similar to"}
_PUNCTUATION: Final = OPERATORS | OTHER_OPERATORS | {".", "[", "]"}
_QUOTED: Final = {TokenType.STRING: "'", TokenType.IDENTIFIER: '"'}
_ODD_STRINGS: Final = frozenset(t for t in TokenType if t.name.endswith("_STRING"))


class _Tokenizer(Postgres.Tokenizer):
    # Every other word is a name: no token of two words, and no command.
    KEYWORDS: ClassVar = {
        **{
            word: type_
            for word, type_ in Postgres.Tokenizer.KEYWORDS.items()
            if not word[0].isalpha() or word.lower() in _WORDS
        },
        "!~": TokenType.RLIKE,
        "!~*": TokenType.IRLIKE,
    }


class Dialect(Postgres):
    """sqlglot's Postgres, with the words of the language alone."""

    Tokenizer = _Tokenizer


def tokenize(text: str) -> list[Token]:
    """Return a text's tokens, each of them one of the language; raises `ExpressionError`."""
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(
            MAX_CHARACTERS + 1,
            f"it has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed",
        )
    if strange := _STRANGE.search(text):
        raise ExpressionError(
            strange.start() + 1, f"the character U+{ord(strange[0]):04X} is not allowed"
        )
    try:
        tokens = list(Dialect().tokenize(text))
    except SqlglotError:
        at = _unclosed(text)
        if at == len(text):
            raise ExpressionError(1, "it can't be read: comments are not allowed") from None
        raise ExpressionError(at + 1, "a quote that is opened here is not closed") from None
    for token in tokens:
        if token.comments:
            raise ExpressionError(_comment(text, token) + 1, "comments are not allowed")
    if not tokens:
        raise ExpressionError(1, "it is empty" if not text.strip() else "comments are not allowed")
    return [_checked(text, tokens, at) for at in range(len(tokens))]


def _checked(text: str, tokens: list[Token], at: int) -> Token:
    """Return a token as Postgres has it; sqlglot forgives much."""
    token = tokens[at]
    start, end = token.start, token.end + 1
    source = text[start:end]
    if token.token_type in _ODD_STRINGS:
        _refuse(start, "strings with a prefix or dollar signs are not allowed; write '…'")
    if (quote := _QUOTED.get(token.token_type)) is not None:
        is_string = quote == "'"
        if source != quote + token.text.replace(quote, quote * 2) + quote or source == '""':
            what, form = ("string", "'…'") if is_string else ("name", '"…"')
            _refuse(start, f"this {what} can't be read; write {form}, a quote in it doubled")
        if is_string and at and tokens[at - 1].token_type is TokenType.STRING:
            _refuse(start, "two strings side by side; join them by ||")
    elif token.token_type is TokenType.NUMBER:
        if not NUMBER.match(source) or _FOLLOWER.match(text, end):
            _refuse(start, "this number can't be read; write 1, 1.5 or 1.5e3")
    elif WORD.match(source):
        if fold(source) not in _WORDS:  # to sqlglot the dotless i is an i
            return Token(TokenType.VAR, source, 1, end, start, token.end)
    elif source not in _PUNCTUATION and token.token_type is not TokenType.SIMILAR_TO:
        _refuse(start, f"{source[:20]!r} is not allowed{HINTS.get(source, '')}")
    return token


def _unclosed(text: str) -> int:
    end = 0
    for match in re.finditer(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|[^'\"]+", text):
        if match.start() != end:
            break
        end = match.end()
    return end


def _comment(text: str, token: Token) -> int:
    found = _COMMENT.search(text, token.end + 1) or _COMMENT.search(text)
    return found.start() if found else token.start


def _refuse(start: int, reason: str) -> NoReturn:
    raise ExpressionError(start + 1, reason)
