"""Spark's Python daemon, with what every worker of a pipeline imports already in memory.

Spark forks its workers from this process; set by `spark.python.daemon.module`. None of the imports
starts a thread, which a fork would lose.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pyspark.daemon
import pyspark.worker

import penstock.sinks.nats
import penstock.spark.source
import penstock.spark.writer  # noqa: F401


def _print(*values: Any, **options: Any) -> None:
    # Spark drops workers that were idle for a minute; that such a worker can't answer is no error.
    if not str(values[0]).startswith("PySpark daemon failed to flush"):
        print(*values, **options)  # noqa: T201


if __name__ == "__main__":
    pyspark.daemon.print = _print  # type: ignore[attr-defined]
    # A worker collects garbage after every task: all that is imported would be walked each time.
    gc.collect()
    gc.freeze()
    pyspark.daemon.manager()
    sys.exit()
