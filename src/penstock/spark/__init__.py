"""The Spark side: the session, the source, the sink, the pipeline.

`PostgresChanges` and `JetStream` are for any PySpark job; register them with
`spark.dataSource.register`.
"""

from penstock.spark.sink import JetStream
from penstock.spark.source import PostgresChanges

__all__ = ["JetStream", "PostgresChanges"]
