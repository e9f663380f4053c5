"""The tuned session: the one place where Penstock sets Spark, each setting with its reason.

The figures were measured on two cores with pyspark 4.3.0; see docs/performance.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

SETTINGS: Final[dict[str, str]] = {
    # A Python task costs 40 ms less over Unix sockets than over TCP (delayed ACK).
    "spark.python.unix.domain.socket.enabled": "true",
    # Without Hadoop's native library the default manager forks chmod and readlink for each file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing"
        ".FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    # A batch with no data would be run to update watermarks; there are none.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Its plan never changes, and re-planning costs milliseconds in every batch.
    "spark.sql.adaptive.enabled": "false",
    # A batch from Arrow to Arrow in as few pieces as possible.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
    # Progress is kept for `/metrics`, not for a user interface.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.ui.retainedTasks": "10",
    # The C2 compiler takes a small machine's cores from the work: 10 % more throughput, p50 a
    # quarter lower. The heap holds plans and one batch at a time.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.driver.memory": "512m",
    # Workers are forked with Penstock's modules in memory: imported once, and shared.
    "spark.python.daemon.module": "penstock.spark.daemon",
}


def create(
    master: str, conf: Mapping[str, str] | None = None, *, app: str = "penstock"
) -> SparkSession:
    """Return a session for `master` with `SETTINGS`, and `conf` over them.

    Executors run this process's own Python. Raises what Spark raises when it can't start.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app).master(master)
    if master.startswith("local"):
        # A host name that resolves elsewhere must not keep a local session from starting.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.config("spark.driver.host", "127.0.0.1")
    settings = {**SETTINGS, **(conf or {})}
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    settings["spark.driver.extraJavaOptions"] += f" -Dlog4j2.configurationFile={quiet}"
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
