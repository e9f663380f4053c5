"""Each function and operator gives what Postgres gives, value by value, nulls and errors included."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession
from tests.expressions_help import FORMS, Bed, Generator, Outcome, Pair, random_rows

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.expressions import Kind, parse_condition, parse_value, typed
from penstock.expressions.functions import FUNCTIONS
from penstock.expressions.literals import narrow
from penstock.expressions.nodes import Typed
from penstock.spark.session import create

ROWS = 40
CALLS = 12
"""How many calls of each function are compared."""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    # Without compiled code a job that runs once takes half the time.
    conf = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    session = create("local[2]", {"spark.sql.session.timeZone": "UTC", **conf})
    yield session
    session.stop()


@pytest.fixture(scope="module")
def bed(postgres: EmbeddedPostgres, spark: SparkSession) -> Iterator[Bed]:
    name = "test_functions"
    database = Database(name, postgres.create_database(name))
    with psycopg.connect(database.url, autocommit=True) as connection:
        yield Bed(connection, spark)
    database.drop(postgres.url)


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
