"""The tuned session: the one place where Penstock sets Spark, each setting with its reason.

The figures were measured on two cores with pyspark 4.3.0; see docs/performance.md.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from penstock.core.errors import SparkError
from penstock.core.health import Failure
from penstock.spark.java import inspect_java
from penstock.spark.reasons import java_failure, start_failure
from penstock.spark.stderr import Forwarder

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
    # With Spark's 64 KiB a small block would wait in three buffers until others fill them. With 64 bytes
    # each Arrow batch passes at once, and large ones are not slower.
    "spark.buffer.size": "64",
    # A local session has slots for every query that there may be (`local_master`); without this a
    # thread for each of them.
    "spark.rpc.netty.dispatcher.numThreads": "4",
    # Workers are forked with Penstock's modules in memory: imported once, and shared.
    "spark.python.daemon.module": "penstock.spark.daemon",
    # Otherwise each worker that Spark drops after an idle minute leaves a trace on standard error.
    "spark.python.daemon.killWorkerOnFlushFailure": "false",
    "spark.sql.execution.pyspark.udf.daemonKillWorkerOnFlushFailure": "false",
}


_LOCAL_SLOTS: Final = 512


def local_master(master: str) -> str:
    """Return a `local[n]` master with slots for all queries; any other master as it is.

    The tasks of a long batch hold their slots, which cost a local session nothing.
    """
    return master if _local_cores(master) is None else f"local[{_LOCAL_SLOTS}]"


def lanes(spark: SparkSession, master: str, sources: int) -> int:
    """Return how many tasks a long batch of one of so many sources may have, by the configured master.

    On a cluster the sources share its slots; where these are fewer, there is one a source.
    """
    cores = _local_cores(master)
    return max(1, spark.sparkContext.defaultParallelism // sources) if cores is None else cores


def _local_cores(master: str) -> int | None:
    match = re.fullmatch(r"local(?:\[(\*|\d+)\])?", master)
    if match is None:
        return None
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)


def create(
    master: str,
    conf: Mapping[str, str] | None = None,
    *,
    app: str = "penstock",
    step: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> SparkSession:
    """Return a session for `master` with `SETTINGS`, and `conf` over them.

    Executors run this process's own Python. The JVM and the session are each started in the context
    that `step` returns. Raises `SparkError`.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    settings = {**SETTINGS, **(conf or {})}
    if master.startswith("local"):
        # A host name that resolves elsewhere must not keep a local session from starting.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings.setdefault("spark.driver.host", "127.0.0.1")
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    settings["spark.driver.extraJavaOptions"] += f" -Dlog4j2.configurationFile={quiet}"
    spark_conf = SparkConf(loadDefaults=False).setAppName(app).setMaster(master)
    spark_conf.setAll(list(settings.items()))
    try:
        if SparkContext._gateway is None:
            with step("Java"):
                _launch(spark_conf)
        with step("Spark"):
            made = SparkSession.builder.config(conf=spark_conf).getOrCreate()
            made.conf.get("spark.app.name")  # reads all settings, which are not checked before
        for stderr in _stderr:
            stderr.started()
    except (PySparkException, Py4JError, OSError) as error:
        raise _error(start_failure(error, last_errors())) from error
    return made


_LAST_WORDS_SECONDS: Final = 2.0
_stderr: Final[list[Forwarder]] = []


_LAUNCH: Final = ("spark.driver.", "spark.jars")


def _launch(conf: SparkConf) -> None:
    """Start the JVM as pyspark does, but for its command line and its standard error."""
    # Settings of the JVM itself alone: what is given at the launch stands on its command line, for
    # every user of the machine to read.
    launch = SparkConf(loadDefaults=False)
    launch.setAll([pair for pair in conf.getAll() if pair[0].startswith(_LAUNCH)])
    stderr = Forwarder()
    try:
        gateway = launch_gateway(  # type: ignore[no-untyped-call]
            launch, popen_kwargs={"stderr": stderr.file}
        )
    except PySparkRuntimeError as error:
        stderr.close()
        raise _error(_without_java(stderr.last(_LAST_WORDS_SECONDS))) from error
    stderr.close()
    SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
    _stderr.append(stderr)


def _error(failure: Failure) -> SparkError:
    return SparkError(failure.code, failure.cause, remedy=failure.remedy)


def _without_java(printed: list[str]) -> Failure:
    """Return why the JVM did not start: most often Java is missing, or too old."""
    java = inspect_java()
    if java.level == "error":
        return Failure("java", f"Spark can't start: Java: {java.message}.", java.fix)
    return java_failure(printed)


def last_errors() -> list[str]:
    """Return what Spark's processes wrote last to standard error, our own log left out."""
    return [line for stderr in _stderr[-1:] for line in stderr.last()]


def jvm_exit_code() -> int | None:
    """Return how Spark's JVM ended, or None while it runs."""
    process = getattr(SparkContext._gateway, "proc", None)
    try:
        # A connection breaks a moment before its process can be waited for.
        return None if process is None else process.poll()
    except OSError:
        return None
