"""Conditions evaluated by Spark give what Postgres' WHERE gives."""

from __future__ import annotations

import random
from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from tests.expressions_help import Bed, Generator, random_rows

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.expressions import ExpressionError
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


CONDITIONS = 70


@given(seed=st.integers(0, 2**64))
@settings(
    max_examples=3, deadline=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_random_conditions_give_what_postgres_gives(bed: Bed, seed: int) -> None:
    rng = random.Random(seed)
    bed.fill(random_rows(rng, 40))
    generator = Generator(rng)
    pairs, all_typed = [], []
    while len(pairs) < CONDITIONS:
        pair = generator.condition(3)
        if len(pair.ours) > 1500:
            continue
        try:
            all_typed.append(bed.typed(pair.ours))
        except ExpressionError as error:
            # Only for what Postgres would refuse too, or what needs more digits than there are.
            assert "digits" in error.reason, (pair.ours, str(error))
            continue
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
