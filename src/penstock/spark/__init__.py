"""The Spark side: the session, the source, the sink, the pipeline.

`PostgresChanges` and `JetStream` are for any PySpark job; register them with
`spark.dataSource.register`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.sink import JetStream
    from penstock.spark.source import PostgresChanges

__all__ = ["JetStream", "PostgresChanges"]


def __getattr__(name: str) -> Any:
    # Imported where they are asked for: what starts the JVM must not wait for pyspark.
    if name == "JetStream":
        from penstock.spark.sink import JetStream  # noqa: PLC0415

        return JetStream
    if name == "PostgresChanges":
        from penstock.spark.source import PostgresChanges  # noqa: PLC0415

        return PostgresChanges
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
