"""`--where` of a backfill: one condition over a table's columns, checked by the source's Postgres.

PREPARE in a read-only transaction checks names, types and grammar, of the condition in parentheses and
of the same without them. Nothing that closes these parentheses, adds a clause or a statement, or leaves
a quote or a comment open is valid in both. Nothing is planned or executed.

Postgres has no such check for what a condition calls, and a function may have an effect or read
settings and other tables. `functions` finds the names, by sqlglot's tokenizer, and refuses queries and
whatever a name could hide in. Then the catalog is asked: the session's `search_path` is empty, so that
a plain name is that of a built-in function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, Final, LiteralString, NamedTuple

import psycopg
from psycopg import sql
from sqlglot import TokenType
from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import TokenError

from penstock.backfill.ranges import trusted
from penstock.core import queries
from penstock.core.connect import Connection
from penstock.core.errors import SetupError
from penstock.core.tables import fold

MAX_CHARACTERS: Final = 4_000

_SQL: Final = queries.load("penstock.backfill", "tables.sql")
_STRANGE: Final = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff]")
_NO_SPACE: Final = re.compile(r"[^ \t\r\n\f]")
_PREFIXED: Final = frozenset({TokenType.BYTE_STRING, TokenType.UNICODE_STRING})
_QUERY: Final = frozenset({"select", "with", "values", "table"})
_SESSION: Final = frozenset(
    ["current_catalog", "current_role", "current_schema", "current_user", "session_user", "system_user",
     "user"]
)  # fmt: skip
"""Words of SQL for what a session is; a column of such a name stands in quotes."""
_REMEDIES: Final = {
    "42P01": "Write a column alone, as id, and a part of JSON as data ->> 'key'.",
    "42883": "Cast what is compared; functions and operators of extensions are not taken here.",
}
"""By SQLSTATE; where it is not here, Postgres' own hint."""


class _Tokenizer(Postgres.Tokenizer):
    # Each word is a token, and a name: none has two words, and none makes a string of what follows.
    KEYWORDS: ClassVar = {
        word: kind for word, kind in Postgres.Tokenizer.KEYWORDS.items() if not word[0].isalpha()
    }


class _Dialect(Postgres):
    Tokenizer = _Tokenizer


class _Token(NamedTuple):
    kind: str
    text: str
    start: int

    @property
    def symbol(self) -> str:
        """The character, of what is no word, name or string: a column may be called `(`."""
        return self.text if self.kind == "other" else ""


def check(connection: Connection, name: sql.Identifier, text: str) -> None:
    """Check that a text is a condition that a backfill of a table can have.

    `connection` is in autocommit mode and has an empty `search_path`. Raises `SetupError` for what is
    refused, and psycopg's errors where the server can't check it.
    """
    called, is_read = dict[str, int](), True
    try:
        called.update((token.text, token.start) for token in functions(text))
    except TokenError:
        is_read = False  # a quote is open: Postgres reports where
    with connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        for (refused,) in connection.execute(_SQL["refused"], [list(called)]).fetchall():
            raise _refusal(
                called[refused],
                f"{refused} is not allowed: it has an effect, or its value is not the row's alone",
            )
        _prepare(connection, _SQL["condition"], name, text)
        _prepare(connection, _SQL["bare_condition"], name, text)
    if not is_read:
        raise _refusal(0, "a quote is not closed")


def functions(text: str) -> Iterator[_Token]:
    """Yield the names of the functions that a text calls, folded.

    A name may be a word before a parenthesis that is no function, as in `in (…)`. Raises `SetupError`
    for queries, for words of the session, and for what a name could hide in; `TokenError` for a quote
    that is not closed.
    """
    tokens = list(_tokens(text))
    if not tokens:
        raise _refusal(0, "it is empty")
    before = _Token("other", "(", 0)
    for token, after in pairwise([*tokens, _Token("other", ")", len(text))]):
        if token.kind == "word" and token.text in _QUERY and before.symbol == "(":
            raise _refusal(token.start, f"{token.text} is not allowed: no subqueries")
        if token.kind == "word" and token.text in _SESSION and before.symbol != ".":
            raise _refusal(
                token.start, f"{token.text} is not allowed: its value is not the row's alone"
            )
        if token.kind in ("word", "name") and after.symbol == "(":
            if before.symbol == "." or token.text == "operator":
                raise _refusal(token.start, "functions are called by their plain names alone")
            yield token
        elif before.symbol == "." and token.text.startswith("pg_"):
            yield token  # to Postgres, orders.f is f(orders) where there is no such column
        before = token


def _tokens(text: str) -> Iterator[_Token]:
    if len(text) > MAX_CHARACTERS:
        reason = f"it has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed"
        raise _refusal(MAX_CHARACTERS, reason)
    if strange := _STRANGE.search(text):
        raise _refusal(strange.start(), f"the character U+{ord(strange[0]):04X} is not allowed")
    end = 0
    for token in _Dialect().tokenize(text):
        _check_skipped(text, end, token.start)
        start, end = token.start, token.end + 1
        found = text[start:end]
        if found[0] == "$":
            raise _refusal(start, "'$' is not allowed: one condition alone")
        of_name = found[0] == '"' and text[start - 1 : start] == "&"
        if of_name or token.token_type in _PREFIXED:
            raise _refusal(start - of_name, "strings with a prefix are not allowed; write '…'")
        if token.token_type is TokenType.VAR:
            yield _Token("word", fold(found), start)
        elif found[0] == '"':
            yield _Token("name", token.text, start)
        else:
            yield _Token("string" if found[-1] == "'" else "other", found, start)
    _check_skipped(text, end, len(text))


def _check_skipped(text: str, start: int, end: int) -> None:
    """Refuse what sqlglot skips between two tokens, unless it is a space of Postgres'."""
    if skipped := _NO_SPACE.search(text, start, end):
        what = f"the character U+{ord(skipped[0]):04X} is"
        if text.startswith(("--", "/*"), skipped.start()):
            what = "comments are"
        raise _refusal(skipped.start(), f"{what} not allowed")


def _prepare(connection: Connection, shape: LiteralString, name: sql.Identifier, text: str) -> None:
    """Have Postgres check a text where a statement's shape has it; raises `SetupError`."""
    head, _, tail = shape.partition("{condition}")
    before = sql.SQL(head).format(table=name)
    try:
        # The extended protocol takes one statement alone.
        connection.execute(before + trusted(text) + sql.SQL(tail), binary=True)
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as error:
        raise _refused(error, len(before.as_string(connection)), text) from None
    except UnicodeError:
        raise _refusal(0, "it has characters that the database's encoding lacks") from None
    connection.execute("DEALLOCATE penstock_condition")


def _refusal(start: int, reason: str, remedy: str = "") -> SetupError:
    return SetupError("refused", f"--where: position {start + 1}: {reason}.", remedy=remedy)


def _refused(error: psycopg.Error, before: int, text: str) -> SetupError:
    """Return what Postgres reports of a text that has `before` characters before it."""
    found = error.diag
    at = int(found.statement_position or 0) - 1 - before
    remedy = _REMEDIES.get(error.sqlstate or "") or found.message_hint or ""
    reason = found.message_primary or type(error).__name__
    return _refusal(min(max(at, 0), len(text)), reason, remedy)
