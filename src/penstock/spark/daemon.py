"""Spark's Python daemon, with what every worker of a pipeline imports already in memory.

Spark forks its workers from this process; set by `spark.python.daemon.module`.
"""

import pyarrow.compute
import pyarrow.flight
import pyspark.worker  # noqa: F401
from pyspark.daemon import manager

import penstock.sinks.nats
import penstock.spark.source
import penstock.spark.writer  # noqa: F401

if __name__ == "__main__":
    manager()
