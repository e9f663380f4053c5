"""From text to sqlglot's tokens, and the first refusals: size, strange characters, comments."""

from __future__ import annotations

import re
from string import ascii_lowercase, ascii_uppercase
from typing import Final

from sqlglot import Token
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import SqlglotError

from penstock.expressions.errors import ExpressionError
from penstock.expressions.syntax import MAX_CHARACTERS

_FOLD: Final = str.maketrans(ascii_uppercase, ascii_lowercase)
_STRANGE: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def tokenize(text: str) -> list[Token]:
    """Return a text's tokens, not yet checked; raises `ExpressionError`."""
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
        tokens = list(Postgres().tokenize(text))
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
    return tokens


def _unclosed(text: str) -> int:
    end = 0
    for match in re.finditer(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|[^'\"]+", text):
        if match.start() != end:
            break
        end = match.end()
    return end


def _comment(text: str, token: Token) -> int:
    after = re.compile(r"--|/\*").search(text, token.end + 1)
    before = re.compile(r"--|/\*").search(text)
    found = after or before
    return found.start() if found else token.start


def fold(word: str) -> str:
    """Return an unquoted name as Postgres takes it."""
    return word.translate(_FOLD)
