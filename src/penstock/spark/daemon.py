"""Spark's Python daemon, with what a pipeline's workers import already in memory.

Spark starts one for each kind of worker (`spark.python.daemon.module`) and forks the workers from it.
Only the kind that runs tasks is given the modules: the others plan a query once, and then idle. None
of the imports starts a Python thread, which a fork would lose.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import pyspark.daemon


def _print(*values: Any, **options: Any) -> None:
    # Spark drops workers that were idle for a minute; that such a worker can't answer is no error.
    if not str(values[0]).startswith("PySpark daemon failed to flush"):
        print(*values, **options)  # noqa: T201 - pyspark's own


if __name__ == "__main__":
    pyspark.daemon.print = _print  # type: ignore[attr-defined]  # it has none of its own
    if sys.argv[1:] == ["pyspark.worker"]:
        import dateutil.relativedelta  # type: ignore[import-untyped]  # pyarrow looks for it  # noqa: F401
        import pyarrow.flight  # noqa: F401 - loaded before the forks
        import pyspark.worker

        import penstock.spark.source
        import penstock.spark.writer  # noqa: F401 - as above
    # A worker collects garbage after every task: all that is imported would be walked each time.
    gc.collect()
    gc.freeze()
    pyspark.daemon.manager()
