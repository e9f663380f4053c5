"""`--where` of a backfill: one condition over a table's columns, checked by the source's Postgres.

A condition passes three checks, each for what the others can't see:

1. Its tokens: it can't end the statement, leave its parentheses, hide a part in a comment or a string
   of another kind, or begin a query.
2. The catalog: its functions are built in, and none has an effect or reads settings or other tables.
   The session's `search_path` is empty, so that a plain name is a built-in one.
3. PREPARE in a read-only transaction: names, types and grammar. Nothing is planned or executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import psycopg
from psycopg import sql

from penstock.backfill.ranges import trusted
from penstock.core import queries
from penstock.core.connect import Connection
from penstock.core.errors import SetupError
from penstock.core.tables import fold

MAX_CHARACTERS: Final = 4_000

_SQL: Final = queries.load("penstock.backfill", "tables.sql")
_TOKEN: Final = re.compile(
    r"""(?P<string>'(?:[^']|'')*') | (?P<quoted>"(?:[^"]|"")+") | (?P<open>['"])
    | (?P<comment>--|/\*) | (?P<space>[ \t\r\n\f]+)
    | (?P<word>[A-Za-z_\x80-\U0010ffff][A-Za-z0-9_$\x80-\U0010ffff]*) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_STRANGE: Final = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff]")
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
    called = {token.text: token.start for token in functions(text)}
    statement = sql.SQL(_SQL["condition"]).format(table=name, condition=trusted(text))
    with connection.transaction():
        connection.execute("SET TRANSACTION READ ONLY")
        for (refused,) in connection.execute(_SQL["refused"], [list(called)]).fetchall():
            raise _refusal(
                called[refused],
                f"{refused} is not allowed: it has an effect, or its value is not the row's alone",
            )
        try:
            # The extended protocol takes one statement alone.
            connection.execute(statement, binary=True)
        except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as error:
            before = len(statement.as_string(connection)) - len(text) - len(")")
            raise _refused(error, before, text) from None
        except UnicodeError:
            raise _refusal(0, "it has characters that the database's encoding lacks") from None
        connection.execute("DEALLOCATE penstock_condition")


def functions(text: str) -> Iterator[_Token]:
    """Yield the names of the functions that a text calls, folded, and check its other tokens.

    A name may be a word before a parenthesis that is no function, as in `in (…)`. Raises `SetupError`.
    """
    tokens = list(_tokens(text))
    if not tokens:
        raise _refusal(0, "it is empty")
    opened: list[_Token] = []
    before = _Token("other", "(", 0)
    for token, after in pairwise([*tokens, _Token("other", ")", len(text))]):
        if token.symbol == "(":
            opened.append(token)
        elif token.symbol == ")":
            if not opened:
                raise _refusal(token.start, "`)` without `(`")
            opened.pop()
        elif token.kind == "word" and token.text in _QUERY and before.symbol == "(":
            raise _refusal(token.start, f"{token.text} is not allowed: no subqueries")
        elif token.kind == "word" and token.text in _SESSION and before.symbol != ".":
            raise _refusal(
                token.start, f"{token.text} is not allowed: its value is not the row's alone"
            )
        elif token.kind in ("word", "quoted") and after.symbol == "(":
            if before.symbol == "." or token.text == "operator":
                raise _refusal(token.start, "functions are called by their plain names alone")
            yield token
        elif before.symbol == "." and token.text.startswith("pg_"):
            yield token  # to Postgres, orders.f is f(orders) where there is no such column
        before = token
    if opened:
        raise _refusal(opened[-1].start, "this parenthesis is not closed")


def _refusal(start: int, reason: str, remedy: str = "") -> SetupError:
    return SetupError("refused", f"--where: position {start + 1}: {reason}.", remedy=remedy)


def _refused(error: psycopg.Error, before: int, text: str) -> SetupError:
    """Return what Postgres reports of a text that has `before` characters before it."""
    found = error.diag
    at = int(found.statement_position or 0) - 1 - before
    remedy = _REMEDIES.get(error.sqlstate or "") or found.message_hint or ""
    reason = found.message_primary or type(error).__name__
    return _refusal(min(max(at, 0), len(text)), reason, remedy)


def _tokens(text: str) -> Iterator[_Token]:
    if len(text) > MAX_CHARACTERS:
        reason = f"it has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed"
        raise _refusal(MAX_CHARACTERS, reason)
    if strange := _STRANGE.search(text):
        raise _refusal(strange.start(), f"the character U+{ord(strange[0]):04X} is not allowed")
    last, end = "", 0
    for match in _TOKEN.finditer(text):
        kind, found, start = str(match.lastgroup), match[0], match.start()
        if kind == "comment":
            raise _refusal(start, "comments are not allowed")
        if kind == "open":
            raise _refusal(start, "a quote that is opened here is not closed")
        if found in (";", "$"):
            raise _refusal(start, f"{found!r} is not allowed: one condition alone")
        if kind in ("string", "quoted") and end == start and last in ("e", "&"):
            raise _refusal(start - 1, "strings with a prefix are not allowed; write '…'")
        if kind == "word":
            found = fold(found)
        elif kind == "quoted":
            found = found[1:-1].replace('""', '"')
        last, end = found, match.end()
        if kind != "space":
            yield _Token(kind, found, start)
