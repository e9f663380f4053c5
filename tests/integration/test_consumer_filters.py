"""A consumer's filter in SQL gives what Postgres gives over the table itself."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from tests.expressions_help import FORMS, OUTCOMES, TABLE, Generator, Pair, random_rows

from penstock.embedded.handles import Database
from penstock.expressions import Columns, ExpressionError, load_columns
from penstock.expressions.functions import FUNCTIONS
from penstock.streams.catalogs import catalog_body, read_catalog
from penstock.streams.consumers import sql_filter
from penstock.streams.consumers.types import WrongSetting

CALLS = 4
CONDITIONS = 60
ROWS = 24
ROW = "INSERT INTO things VALUES (" + ", ".join(["%s"] * 21) + ")"


class Bed:
    """Evaluates conditions over the rows of `things`, as a table and as messages of a stream."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        for statement in (
            "SET timezone = 'UTC'", "SET intervalstyle = 'iso_8601'", TABLE, OUTCOMES,
            "CREATE SCHEMA penstock",
        ):  # fmt: skip
            connection.execute(statement)
        columns = load_columns(connection, [("public", "things")])
        self.columns: Columns = read_catalog(json.loads(json.dumps(catalog_body(columns))))
        assert self.columns == columns
        self.messages: list[str] = []

    def fill(self, rng: random.Random) -> None:
        self.connection.execute("TRUNCATE things")
        with self.connection.cursor() as cursor:
            cursor.executemany(ROW, random_rows(rng, ROWS))
        found = self.connection.execute(
            "SELECT to_json(whole)::text FROM things AS whole ORDER BY id"
        )
        metadata = '{"table_schema":"public","table_name":"things"}'
        self.messages = [f'{{"record":{row},"metadata":{metadata}}}' for (row,) in found]

    def ours(self, condition: str, *messages: str, action: str = "insert") -> list[str | None]:
        version = self.connection.info.server_version
        made = sql_filter.planned(condition, self.columns, "shop", version)
        self.connection.execute(sql_filter.create(1, made))
        given = list(messages or self.messages)
        query = (
            "SELECT penstock.filter_1(m, %s) FROM unnest(%s::text[]) WITH ORDINALITY AS g (m, n)"
        )
        return [row[0] for row in self.connection.execute(query + " ORDER BY n", [action, given])]

    def postgres(self, condition: str) -> list[str | None]:
        found = self.connection.execute("SELECT outcome FROM outcomes(%s)", [condition])
        return [row[0] for row in found]

    def wrong(self, pair: Pair) -> list[tuple[str, int, str | None, str | None]]:
        found = []
        rows = zip(self.ours(pair.ours), self.postgres(pair.theirs), self.messages, strict=True)
        for row, (mine, theirs, message) in enumerate(rows):
            if theirs is None or not theirs.startswith("error"):
                expected = message if theirs == "true" else None
            else:
                expected = mine if mine is None or mine.startswith("!") else "!"
            if mine != expected:
                found.append((pair.ours, row, mine and mine[:200], theirs))
        return found


@pytest.fixture(scope="module")
def bed(postgres: Any) -> Iterator[Bed]:
    name = "test_consumer_filters"
    database = Database(name, postgres.create_database(name))
    with psycopg.connect(database.url, autocommit=True) as connection:
        yield Bed(connection)
    database.drop(postgres.url)


def test_random_conditions_give_what_postgres_gives(bed: Bed) -> None:
    rng = random.Random(7)
    generator = Generator(rng)
    bed.fill(rng)
    wrong = []
    for _ in range(CONDITIONS):
        wrong += bed.wrong(generator.condition(3))
    assert not wrong, "\n".join(map(str, wrong[:20]))


def test_every_function_gives_what_postgres_gives(bed: Bed) -> None:
    rng = random.Random(8)
    generator = Generator(rng)
    bed.fill(rng)
    wrong, refused = [], set()
    for name in [*FUNCTIONS, *FORMS]:
        for _ in range(CALLS):
            call = generator.call(name)
            for form in ("({0}) is null", "({0})::text = 'a'", "({0}) = ({0})"):
                try:
                    wrong += bed.wrong(generator.join(form, call))
                    break
                except (ExpressionError, WrongSetting):
                    continue
            else:
                refused.add(name)
    assert not wrong, "\n".join(map(str, wrong[:20]))
    assert not refused


MESSAGE = (
    '{"record":{"id":1,"t":"a","k":5,"j":null},"changes":{"t":"b"},"metadata":{"table_schema":"public",'
    '"table_name":"things","commit_lsn":7}}'
)
FAILED = "!the filter can't be evaluated: record.n not in the message"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("record.n > 1", FAILED),
        ("record.n > 1 or record.k = 5", True),
        ("record.k = 5 or record.n > 1", True),
        ("record.n > 1 and record.k = 6", False),
        ("record.n is null", FAILED),
        ("record.n is distinct from 1", FAILED),
        ("coalesce(record.k, record.n) = 5", True),
        ("coalesce(record.n, record.k) = 5", FAILED),
        ("case when action = 'delete' then record.n > 1 end", False),
        ("case when action <> 'delete' then record.n > 1 end", FAILED),
        ("greatest(record.n, 1) = 1", FAILED),
        ("changes.t = 'b' and changes.k is null", True),
        ("metadata.commit_lsn = 7 and metadata.table_name = 'things'", True),
        ("record.j -> 'a' is null", True),
        ("1 / (record.k - 5) = 1", "!the filter can't be evaluated: division by zero"),
        ("record.t::int = 1", "!the filter can't be evaluated: invalid input syntax"),
        ("record.t = 'x''); drop table things; --'", False),
        ("record.t = '\\'' or record.t = '$penstock$ %s {} \"'", None),
    ],
)
def test_what_a_message_lacks(bed: Bed, condition: str, expected: bool | str | None) -> None:
    if expected is None:
        with pytest.raises((ExpressionError, WrongSetting)):
            bed.ours(condition, MESSAGE)
        return
    (found,) = bed.ours(condition, MESSAGE)
    if isinstance(expected, str):
        assert found is not None
        assert found.startswith(expected)
    else:
        assert found == (MESSAGE if expected else None)


def test_escapes_that_json_refuses_stand_in_no_other_columns_way(bed: Bed) -> None:
    message = MESSAGE.replace('"j":null', r'"j":{"a":"\u0000","b":"\ud83d","c":"\ud83d\ude00"}')
    assert bed.ours("record.k = 5", message) == [message]


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ("record.nope = 1", "unknown column record.nope"),
        ("to_char(record.ts) = 'a'", "to_char"),
        ("record.t > 1", "don't go together"),
        ("(record.ts + interval '1 day')::text = 'a'", "the text of a time that is computed"),
    ],
)
def test_what_can_not_be_planned_is_refused(bed: Bed, condition: str, text: str) -> None:
    with pytest.raises((ExpressionError, WrongSetting), match=text):
        bed.ours(condition, MESSAGE)
