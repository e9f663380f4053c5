"""A consumer's `filters.sql` as a function of the store, which gives of a message what is handed out.

It returns the message itself where the condition holds, null where it does not, and `!` and the reason
where it can't be evaluated: then the message becomes a dead letter, and no other one is held up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from penstock.core import queries
from penstock.core.text import sentence
from penstock.expressions.catalog import Columns
from penstock.expressions.errors import ExpressionError
from penstock.expressions.postgres.quoting import quoted
from penstock.streams.catalogs import read_catalog
from penstock.streams.consumers.types import Refused, WrongSetting

if TYPE_CHECKING:
    from penstock.expressions.postgres.translate import Translated

FILTER_FAILED: Final = "filter_failed"
FAILED: Final = b"!"
"""What the function's answer begins with where the condition can't be evaluated."""
FIELD: Final = "filters.sql"
FILTER_SQL: Final = queries.load("penstock.streams.consumers", "sql_filter.sql")
_UNICODE: Final = 17
"""The first version of Postgres that knows upper and lower case whatever the system has."""


def filter_function(consumer: int | str) -> sql.Identifier:
    """Return the name of a consumer's function, by its number or by what else it is known."""
    return sql.Identifier("penstock", f"filter_{consumer}")


def passed(consumer: int | str) -> sql.Composable:
    """Return what a consumer's function gives for the message `m`."""
    return sql.SQL("{}(m.message, m.action)").format(filter_function(consumer))


def planned(text: str, columns: Columns | None, source: str, version: int) -> Translated:
    """Return a filter in SQL; `version` is that of the store's server (180001).

    Raises `Refused` where the source's `columns` are not known yet, and `WrongSetting` for what they
    refuse.
    """
    if columns is None:
        raise Refused(
            f"the tables of source {source!r} are not known yet, as it never ran: start "
            "`penstock run`, and try again.",
            FIELD,
        )
    try:
        return translated(text, columns, version)
    except ExpressionError as error:
        raise WrongSetting(sentence(str(error)), FIELD) from None


def translated(text: str, columns: Columns, version: int) -> Translated:
    """Return a condition in SQL as `planned` does; raises `ExpressionError`."""
    from penstock.expressions.parse import parse_condition  # noqa: PLC0415 - takes a while
    from penstock.expressions.postgres.translate import translate  # noqa: PLC0415 - as above

    casing = "pg_c_utf8" if version // 10_000 >= _UNICODE else "default"
    return translate(parse_condition(text), columns, casing=casing)


def install(connection: psycopg.Connection[Any], consumer: int, stream: int, text: str) -> None:
    """Make a consumer's function, in the store's transaction; raises as `planned` does."""
    connection.execute(create(consumer, plan(connection, stream, text)))


def plan(connection: psycopg.Connection[Any], stream: int, text: str) -> Translated:
    """Return a filter of a stream's messages in SQL; raises as `planned` does."""
    row = connection.execute(FILTER_SQL["catalog"], [stream]).fetchone()
    assert row is not None  # noqa: S101 - the stream is there
    tables, source, version = row
    columns = None if tables is None else read_catalog(tables)
    return planned(text, columns, source, version)


def create(consumer: int | str, made: Translated) -> sql.Composed:
    """Return the statement that makes a consumer's function, or replaces it."""
    names = [
        f"CASE WHEN {is_missing} THEN {quoted(name)} END"
        for name, is_missing in made.missing.items()
    ]
    body = FILTER_SQL["body"].format(
        condition=made.sql, bad=made.bad, missing=", ".join(names) or "NULL::text"
    )
    return sql.SQL(FILTER_SQL["create"]).format(
        function=filter_function(consumer), body=sql.Literal(body)
    )


def drop(consumer: int | str) -> sql.Composed:
    """Return the statement that drops a consumer's function, if there is one."""
    return sql.SQL(FILTER_SQL["drop"]).format(function=filter_function(consumer))
