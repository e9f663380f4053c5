"""Conditions, functions and operators that Spark evaluates give what Postgres gives."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from psycopg import sql
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everyone calls it
from tests.expressions_help import FORMS, Bed, Generator, Outcome, Pair, random_rows

from penstock.backfill import condition
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.expressions import (
    ColumnType,
    ExpressionError,
    Field,
    Kind,
    Typed,
    load_columns,
    parse_condition,
    parse_value,
    typed,
)
from penstock.expressions.functions import FUNCTIONS
from penstock.expressions.keys import key_of
from penstock.expressions.literals import narrow
from penstock.expressions.spark import casing
from penstock.expressions.spark.columns import compile as to_columns
from penstock.spark.session import create


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = create("local[2]", {"spark.sql.session.timeZone": "UTC"})
    yield session
    session.stop()


@pytest.fixture(scope="module")
def bed(postgres: EmbeddedPostgres, spark: SparkSession) -> Iterator[Bed]:
    name = "test_expressions"
    database = Database(name, postgres.create_database(name))
    with psycopg.connect(database.url, autocommit=True) as connection:
        yield Bed(connection, spark)
    database.drop(postgres.url)


CONDITIONS = 52
ROWS = 40
CALLS = 12
"""How many calls of each function are compared."""


class _TooComplicatedError(Exception):
    pass


def _compilable(bed: Bed, condition: str) -> Typed:
    made = bed.typed(condition)
    try:
        to_columns(made, lambda field: (F.lit(None).cast(field.type.spark), F.lit(False)))
    except ExpressionError as error:
        raise _TooComplicatedError from error
    return made


@given(seed=st.integers(0, 2**64))
@settings(
    max_examples=4, deadline=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_random_conditions_give_what_postgres_gives(bed: Bed, seed: int) -> None:
    rng = random.Random(seed)
    bed.fill(random_rows(rng, 40))
    generator = Generator(rng)
    pairs: list[Pair] = []
    all_typed: list[Typed] = []
    while len(pairs) < CONDITIONS:
        pair = generator.condition(3)
        if len(pair.ours) > 1500:
            continue
        with contextlib.suppress(_TooComplicatedError):
            all_typed.append(_compilable(bed, pair.ours))
            pairs.append(pair)
    outcomes = bed.spark_outcomes(all_typed)
    wrong = []
    for pair, ours in zip(pairs, outcomes, strict=True):
        for row, (mine, theirs) in enumerate(zip(ours, bed.postgres(pair.theirs), strict=True)):
            if theirs is not None and theirs.startswith("error"):
                continue
            expected = None if theirs is None else theirs == "true"
            if mine.bad or mine.value != expected:
                wrong.append((pair.ours, row, mine, theirs))
    assert not wrong, "\n".join(map(str, wrong[:20]))


@given(seed=st.integers(0, 2**64))
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
def test_what_a_filter_can_have_a_backfill_can_have_too(bed: Bed, seed: int) -> None:
    generator = Generator(random.Random(seed))
    for _ in range(100):
        bare = generator.condition(3).theirs.replace("record.", "")
        if len(bare) <= condition.MAX_CHARACTERS:
            condition.check(bed.connection, sql.Identifier("public", "things"), bare)


TRUE, FALSE, NULL, BAD = (
    Outcome(True, False), Outcome(False, False), Outcome(None, False), Outcome(None, True)
)  # fmt: skip
CASES = [
    # What can't be evaluated is bad, but only where its value matters.
    ("1 / record.zero > 0", BAD),
    ("record.zero = 1 and 1 / record.zero > 0", FALSE),
    ("1 / record.zero > 0 and record.zero = 1", FALSE),
    ("record.zero = 0 or 1 / record.zero > 0", TRUE),
    ("record.zero = 0 and 1 / record.zero > 0", BAD),
    ("not (1 / record.zero > 0)", BAD),
    ("(1 / record.zero) is null", BAD),
    ("(1 / record.zero) is not null", BAD),
    ("(1 / record.zero > 0) is true", BAD),
    ("(1 / record.zero) is distinct from 1", BAD),
    ("((1 / record.zero) is null) is not distinct from null", BAD),
    ("coalesce(1, 1 / record.zero) = 1", TRUE),
    ("coalesce(1 / record.zero, 1) = 1", BAD),
    ("coalesce(record.nothing, 1 / record.zero) = 1", BAD),
    ("coalesce(record.nothing, 1) = 1", TRUE),
    ("case when record.zero = 0 then true else 1 / record.zero > 0 end", TRUE),
    ("case when 1 / record.zero > 0 then true else true end", BAD),
    ("case when record.zero = 0 then 1 / record.zero else 1 end > 0", BAD),
    ("record.zero in (0, 1 / record.zero)", TRUE),
    ("record.zero in (1, 1 / record.zero)", BAD),
    ("record.nothing > 0", NULL),
    ("record.nothing in (1, 2)", NULL),
    ("record.zero not in (1, null)", NULL),
    ("record.zero between record.nothing and -1", FALSE),
    # A value that the message does not have.
    ("record.missing = 1", BAD),
    ("record.missing is null", BAD),
    ("record.missing = 1 or record.zero = 0", TRUE),
    # Errors of Postgres.
    ("record.big + 1 > 0", BAD),
    ("-record.least > 0", BAD),
    ("abs(record.least) > 0", BAD),
    ("record.big * 2 > 0", BAD),
    ("record.least / -1 > 0", BAD),
    ("record.least % -1 = 0", TRUE),
    ("1 % record.zero = 0", BAD),
    ("record.huge * record.huge > 1", BAD),
    ("record.tiny * record.tiny >= 0", BAD),
    ("record.huge::real > 1", BAD),
    ("record.huge::bigint > 1", BAD),
    ("record.big::integer > 1", BAD),
    ("record.word::integer > 1", BAD),
    ("record.word::numeric > 1", BAD),
    ("record.word::boolean", BAD),
    ("record.word::date > '2024-01-01'", BAD),
    ("record.word::timestamptz > '2024-01-01'", BAD),
    ("record.word::uuid = '00000000-0000-0000-0000-000000000000'", BAD),
    ("(record.empty || '2024-02-30')::date = now()::date", BAD),
    ("record.half * record.big * record.big * record.big > 1", BAD),
    ("1 / 0.0 > 1", BAD),
    # Halves.
    ("record.half::integer = 3 and round(record.half) = 3", TRUE),
    ("record.half_float::integer = 2 and round(record.half_float) = 2", TRUE),
    ("round(-2.5) = -3 and round(2.345, 2) = 2.35 and round(-1250, -2) = -1300", TRUE),
    ("7 / 2 = 3 and -7 / 2 = -3 and -7 % 3 = -1 and 7.5 % 2 = 1.5", TRUE),
    ("2.0 / 3 > 0.66666666666666666 and 2.0 / 3 < 0.66666666666666667", TRUE),
    ("0.1 + 0.2 = 0.3 and 1.10 * 1.10 = 1.21", TRUE),
    ("'0.1'::float8 + '0.2'::float8 <> 0.3", TRUE),
    # Texts.
    ("(record.empty || '2.50')::numeric = 2.5 and (record.empty || '1e3')::numeric = 1e3", TRUE),
    ("(record.empty || ' 7 ')::integer = 7", TRUE),
    ("(record.empty || 'yes')::boolean and not (record.empty || 'of')::boolean", TRUE),
    ("(record.empty || '2024-02-29T10:00:00.5Z')::timestamptz = '2024-02-29 12:00:00.5+02'", TRUE),
    ("(record.empty || '2024-02-29 10:00:00+02')::timestamp = '2024-02-29 10:00'", TRUE),
    ("(record.empty || 'infinity')::timestamp > '9999-12-31 23:59:59.999999'", TRUE),
    ("(now() + interval '1 day')::text like '20__-__-__T__:__:__%Z'", TRUE),
    ("(timestamp '2024-01-31' + interval '1 month')::text = '2024-02-29T00:00:00'", TRUE),
    ("(date '2024-01-31' + 1)::text = '2024-02-01' and ('infinity'::date)::text = 'infinity'", TRUE),
    ("record.zero || 'x' = '0x' and (record.zero + 1)::text = '1'", TRUE),
    ("(1.50 + 1)::text = '2.50' and (round(record.half, 2))::text = '2.50'", TRUE),
    # Case as in C.UTF-8: one character for one.
    ("upper(record.empty || 'straße') = 'STRAßE' and upper('ŉ') = 'ŉ'", TRUE),
    ("upper(record.empty || 'ﬁᾳǰé') = 'ﬁᾼǰÉ'", TRUE),
    ("lower(record.empty || 'ΌΣΟΣ İ') = 'όσοσ i'", TRUE),
    ("(record.empty || 'STRAßE Σ') ilike '%ßE \u03c3' and (record.empty || 'ß') not ilike 'SS'", TRUE),
    # Numerics of any size are compared, and 38 digits computed with.
    ("record.half < 1e390 and record.half > '-Infinity' and record.half <> 'NaN'", TRUE),
    ("record.half in (1e300, 2.5) and coalesce(record.half, 0) < 'NaN'", TRUE),
    ("record.half * 1000000 + 1 > '-1e50' and record.half - 3 between -1e30 and 0", TRUE),
    ("-record.half * 3 < -7.4999999999999999999999 and -record.half * 3 > -7.51", TRUE),
    ("record.half / 1000000 < 0.0000026 and record.half % 0.5 = 0", TRUE),
    ("record.least + 0 = -9223372036854775808.0 and record.least < -9223372036854775807.5", TRUE),
    # Days and moments before Christ, and after the year 9999.
    ("timestamp '0044-03-15 12:00 BC' < timestamp '0001-01-01'", TRUE),
    ("date '0001-12-31 BC' + record.zero::int + 1 = date '0001-01-01'", TRUE),
    ("date '5874897-12-31' + record.zero < 'infinity' and date '4714-11-24 BC' > '-infinity'", TRUE),
    ("timestamp '250000-01-01' + interval '1 year' > '250000-12-31'", TRUE),
    ("date '5874897-12-31' + (record.zero + 1)::int < 'infinity'", BAD),
    ("(date '10000-01-01' + record.zero::int)::text > ''", BAD),
    ("(date '5874897-12-31' + record.zero::int)::timestamp > now()", BAD),
    ("timestamp '294246-12-31' + interval '1 day' > '2024-01-01'", BAD),
    # A numeric keeps all its digits.
    ("record.big + 0.000000000000000001 > record.big", TRUE),
    ("now() > '2024-01-01' and now() < 'infinity'", TRUE),
]  # fmt: skip


def test_what_can_not_be_evaluated_is_bad_only_where_it_matters(spark: SparkSession) -> None:
    names = {
        "zero": ("int8", 0), "nothing": ("int8", None), "missing": ("int8", None),
        "big": ("int8", 2**63 - 1), "least": ("int8", -(2**63)), "huge": ("float8", 1e300),
        "tiny": ("float8", 1e-300), "word": ("text", "word"), "half": ("numeric", Decimal("2.5")),
        "half_float": ("float8", 2.5), "empty": ("text", ""),
    }  # fmt: skip
    columns = {("public", "t"): {n: ColumnType("pg_catalog", t) for n, (t, _) in names.items()}}
    all_typed = [typed(parse_condition(condition), columns) for condition, _ in CASES]
    schema = ", ".join(f"{n}: {c.type.spark}" for n, c in columns["public", "t"].items())
    row = tuple(value for _, value in names.values())
    frame = spark.createDataFrame([([row],)], f"r array<struct<{schema}>>")

    def of(row: Column) -> Column:
        def leaf(field: Field) -> tuple[Column, Column]:
            name = field.reference.column
            if field.kind is Kind.KEY:
                of_field = None if name == "missing" else names[name][1]
                key = None if of_field is None else key_of(str(of_field))
                return F.lit(key), F.lit(
                    name == "missing" or (of_field is not None and key is None)
                )
            value = row[name] if field.kind is not Kind.TEXT else row[name].cast("string")
            return value, F.lit(name == "missing")

        made = [to_columns(t, leaf) for t in all_typed]
        return F.array(*[F.struct(m.value.alias("v"), m.bad.alias("b")) for m in made])

    (found,) = frame.select(F.transform("r", of).alias("r")).collect()[0].r
    outcomes = [Outcome(o.v, o.v is None and o.b) for o in found]
    wrong = [(c, e, o) for (c, e), o in zip(CASES, outcomes, strict=True) if e != o]
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    "text",
    [
        "coalesce(" * 20 + "record.i" + " + 1, 0)" * 20 + " > 0",
        "abs(" * 28 + "record.i" + ")" * 28 + " > 0",
        "record.ts" + " + interval '1 month'" * 20 + " > now()",
        "record.f" + " * 1.1" * 60 + " > 0",
        "case when " * 15 + "record.b" + " then record.b end" * 15,
    ],
)
def test_what_would_be_large_is_refused_before_spark_sees_it(bed: Bed, text: str) -> None:
    with pytest.raises(_TooComplicatedError) as refused:
        _compilable(bed, text)
    assert "too complicated" in str(refused.value.__cause__)


def test_columns_have_the_kinds_of_their_types(database: Database) -> None:
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
        connection.execute("CREATE DOMAIN price AS numeric(10,2) CHECK (value > 0)")
        connection.execute("CREATE DOMAIN dear AS price NOT NULL")
        connection.execute("CREATE TYPE pair AS (a int, b text)")
        connection.execute(
            "CREATE TABLE kinds (s smallint, n numeric, p dear, w numeric(50,40), z numeric(3,-2), "
            "c char(3), v varchar(9), m mood, ms mood[], ps price[], nn numeric(6,3)[], pr pair, "
            "j json, r int4range, u uuid, tz timestamptz(3), ip inet, gone int, x xml)"
        )
        connection.execute("ALTER TABLE kinds DROP COLUMN gone")
        columns = load_columns(connection, [("public", "kinds"), ("public", "none")])
    assert list(columns) == [("public", "kinds")]
    kinds = columns["public", "kinds"]
    assert {n: (c.type.kind.value, c.type.spark, c.type.ordered) for n, c in kinds.items()} == {
        "s": ("int", "bigint", True), "n": ("numeric", "decimal(38,18)", True),
        "p": ("numeric", "decimal(10,2)", True), "w": ("numeric", "decimal(38,38)", True),
        "z": ("numeric", "decimal(5,0)", True), "c": ("text", "string", True),
        "v": ("text", "string", True), "m": ("text", "string", False), "ms": ("json", "string", False),
        "ps": ("json", "string", False), "nn": ("json", "string", False),
        "pr": ("json", "string", False), "j": ("json", "string", False), "r": ("text", "string", False),
        "u": ("text", "string", True), "tz": ("timestamptz", "timestamp", True),
        "ip": ("text", "string", False), "x": ("text", "string", False),
    }  # fmt: skip
    assert kinds["c"].type.width == 3
    assert kinds["m"].type.labels == ("sad", "happy")
    assert kinds["ms"].indexed.labels == ("sad", "happy")
    assert kinds["ps"].indexed.spark == "decimal(10,2)"
    assert kinds["nn"].indexed.spark == "decimal(6,3)"


@pytest.mark.parametrize("after", ["", "é"])
def test_every_character_that_has_a_case(bed: Bed, after: str) -> None:
    """Alone, and before a character that is not ASCII: `upper` treats ASCII texts apart."""
    every = (chr(c) for c in range(1, sys.maxunicode + 1) if not 0xD800 <= c < 0xE000)
    texts = [c + after for c in every if not c == c.upper() == c.lower() == c.title()]
    assert len(texts) > 2_000
    frame = bed.spark.createDataFrame([(texts,)], "texts array<string>")
    ours = frame.select(*(F.transform("texts", to) for to in (casing.upper, casing.lower))).first()
    in_case = 'array_agg({0}(t COLLATE "pg_c_utf8") ORDER BY at)'
    theirs = bed.connection.execute(
        f"SELECT {in_case.format('upper')}, {in_case.format('lower')}"
        " FROM unnest(%s::text[]) WITH ORDINALITY AS of (t, at)",
        [texts],
    ).fetchone()
    assert ours is not None
    assert tuple(ours) == theirs


def test_every_function_is_generated() -> None:
    assert {name for name, function in FUNCTIONS.items() if function.spark is None} <= set(FORMS)


@pytest.mark.parametrize("seed", range(2))
def test_every_function_gives_what_postgres_gives(bed: Bed, seed: int) -> None:
    rng = random.Random(seed)
    bed.fill(random_rows(rng, ROWS))
    generator = Generator(rng)
    names = sorted({*FORMS, *FUNCTIONS})
    pairs = [generator.call(name) for name in names for _ in range(CALLS)]
    wrong: list[tuple[Any, ...]] = []
    for start in range(0, len(pairs), 100):
        wrong += _differences(bed, pairs[start : start + 100])
    # One row of each call is enough to see what is wrong.
    shown = {call: (call, *rest) for call, *rest in wrong}.values()
    assert not wrong, "\n".join(map(str, list(shown)[:60]))


@pytest.mark.parametrize(
    "text", ["repeat('x', 1000000000)", "lpad('x', 1000000000)", "rpad('x', 2000000000, 'ab')"]
)
def test_constants_that_would_fill_the_memory_fail_each_message(bed: Bed, text: str) -> None:
    """Spark computes what is constant once, before any row and whatever condition stands around it."""
    bed.fill(random_rows(random.Random(0), 2))
    made = [typed(parse_condition(c), bed.columns) for c in (f"{text} = ''", "record.id > 0")]
    outcomes, _ = bed.spark_outcomes(made)
    assert [outcome.bad for outcome in outcomes] == [True, True]


def _differences(bed: Bed, pairs: list[Pair]) -> Iterator[tuple[Any, ...]]:
    all_typed = [typed(parse_value(pair.ours), bed.columns) for pair in pairs]
    outcomes = bed.spark_outcomes(all_typed)
    for pair, made, ours in zip(pairs, all_typed, outcomes, strict=True):
        for row, (mine, theirs) in enumerate(zip(ours, bed.postgres(pair.theirs), strict=True)):
            if not _same(pair.ours, made, mine, theirs):
                yield pair.ours, row, mine, theirs


def _same(ours: str, made: Typed, mine: Outcome, theirs: str | None) -> bool:
    if theirs is not None and theirs.startswith("error"):
        # Class 22 is about values; any other would be a fault of the generator.
        return mine.bad and theirs.startswith(("error 22", "error 54000"))
    if made.kind is Kind.NUMERIC and theirs in ("Infinity", "-Infinity"):
        return mine.bad  # no numeric of Spark's is infinite
    if mine.bad or mine.value is None or theirs is None:
        return not mine.bad and mine.value is None and theirs is None
    value = mine.value
    if made.kind is Kind.FLOAT:
        number = narrow(float(theirs)) if made.type.single else float(theirs)
        if "pow" in ours:  # its last digit may differ
            return bool(value == pytest.approx(number, rel=1e-14, abs=0, nan_ok=True))
        return bool(value == number or (math.isnan(value) and math.isnan(number)))
    if made.kind is Kind.NUMERIC:
        return bool(value == Decimal(theirs))
    return str(value) == (theirs.title() if made.kind is Kind.BOOL else theirs)
