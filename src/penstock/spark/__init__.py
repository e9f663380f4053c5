"""The Spark side: the session, the source, the sink, the pipeline.

`PostgresChanges` and `JetStream` are for any PySpark job; register them with
`spark.dataSource.register`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.core import lazy

if TYPE_CHECKING:
    from penstock.spark.sink import JetStream
    from penstock.spark.source import PostgresChanges

__all__ = ["JetStream", "PostgresChanges"]

__getattr__ = lazy.names(__name__, {"JetStream": "sink", "PostgresChanges": "source"})
