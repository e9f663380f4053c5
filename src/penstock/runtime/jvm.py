"""Spark's JVM and its queries, as runs see them."""

from __future__ import annotations

import contextlib

from pyspark.sql import SparkSession

from penstock.core.health import Failure
from penstock.spark.session import jvm_exit_code


def jvm_failure() -> Failure | None:
    """Return that Spark's JVM has ended, None while it runs."""
    if (code := jvm_exit_code()) is None:
        return None
    return Failure(
        "spark",
        f"Spark's JVM ended with exit code {code} (-9: killed, perhaps because memory ran out). What"
        " was not delivered is still in the slot.",
        "Start penstock again.",
    )


def stop_queries(spark: SparkSession, names: set[str]) -> None:
    """Stop the queries of these names that are still in the session."""
    with contextlib.suppress(Exception):  # the JVM may be gone
        for query in spark.streams.active:
            if query.name in names:
                query.stop()
