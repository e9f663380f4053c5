"""The tuned session: the one place where Penstock sets Spark, each setting with its reason.

The figures were measured on two cores with pyspark 4.3.0; see docs/performance.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from penstock.spark.stderr import forward

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
    # Otherwise each worker that Spark drops after an idle minute leaves a trace on standard error.
    "spark.python.daemon.killWorkerOnFlushFailure": "false",
    "spark.sql.execution.pyspark.udf.daemonKillWorkerOnFlushFailure": "false",
}


def local_master(master: str, sources: int) -> str:
    """Return a `local[n]` master with n slots for each source; any other master as it is.

    A sink that is down keeps its source's tasks waiting, and these must leave room for the others.
    """
    match = re.fullmatch(r"local(?:\[(\*|\d+)\])?", master)
    if match is None or sources <= 1:
        return master
    cores = (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)
    return f"local[{cores * sources}]"


def create(
    master: str, conf: Mapping[str, str] | None = None, *, app: str = "penstock"
) -> SparkSession:
    """Return a session for `master` with `SETTINGS`, and `conf` over them.

    Executors run this process's own Python. Raises what Spark raises when it can't start.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    # Groups are told apart by Python's hash, which streams keep: the same in every process.
    os.environ["PYTHONHASHSEED"] = "0"
    settings = {**SETTINGS, **(conf or {})}
    if master.startswith("local"):
        # A host name that resolves elsewhere must not keep a local session from starting.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings.setdefault("spark.driver.host", "127.0.0.1")
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    settings["spark.driver.extraJavaOptions"] += f" -Dlog4j2.configurationFile={quiet}"
    spark_conf = SparkConf(loadDefaults=False).setAppName(app).setMaster(master)
    spark_conf.setAll(list(settings.items()))
    if SparkContext._gateway is None:
        _launch(spark_conf)
    return SparkSession.builder.config(conf=spark_conf).getOrCreate()


_LAUNCH: Final = ("spark.driver.", "spark.jars")


def _launch(conf: SparkConf) -> None:
    """Start the JVM as pyspark does, but for its command line and its standard error."""
    # Settings of the JVM itself alone: what is given at the launch stands on its command line, for
    # every user of the machine to read.
    launch = SparkConf(loadDefaults=False)
    launch.setAll([pair for pair in conf.getAll() if pair[0].startswith(_LAUNCH)])
    gateway = launch_gateway(  # type: ignore[no-untyped-call]
        launch, popen_kwargs={"stderr": subprocess.PIPE}
    )
    SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm

    threading.Thread(
        target=forward, args=(gateway.proc.stderr,), name="spark-stderr", daemon=True
    ).start()


def jvm_exit_code() -> int | None:
    """Return how Spark's JVM ended, or None while it runs."""
    process = getattr(SparkContext._gateway, "proc", None)
    try:
        # A connection breaks a moment before its process can be waited for.
        return None if process is None else process.poll()
    except OSError:
        return None


def reason_of(error: BaseException) -> str:
    """Return the line of a query's failure that says what happened, without the traces around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error:" in line and not line.startswith(("File ", "at ")):
            return line[:500]
    return (lines[0] if lines else type(error).__name__)[:500]
