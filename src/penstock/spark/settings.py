"""The tuned session: the one place where Penstock sets Spark, each setting with its reason.

The figures were measured on two cores with pyspark 4.3.0; see docs/performance.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from penstock.core.blocks import BUFFER_BYTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = structlog.get_logger("penstock.spark")

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
    # On a cluster the executors come after the session. Where `spark.cores.max` says how many cores they
    # will have, the session waits for them: lanes are planned for the slots that there are.
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    # To generate and compile Java for a plan takes a tenth of the CPU of a start, and gains nothing: a
    # row is a block of thousands of messages, over which expressions loop interpreted either way.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    # Progress is kept for `/metrics`, not for a user interface.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
    "spark.sql.ui.retainedExecutions": "1",
    "spark.ui.retainedJobs": "1",
    "spark.ui.retainedStages": "1",
    "spark.ui.retainedTasks": "10",
    # The C2 compiler takes a small machine's cores from the work: 10 % more throughput, p50 a
    # quarter lower. The heap holds plans and one batch at a time: some 55 MiB live, and what is young
    # is filled to its end before it is collected. Java would make that a third of 1/64 of the
    # machine's memory, and let the heap be 70 % free.
    "spark.driver.extraJavaOptions": (
        "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xms48m -Xmn24m -XX:MinHeapFreeRatio=10"
        " -XX:MaxHeapFreeRatio=20"
    ),
    "spark.driver.memory": "512m",
    # With Spark's 64 KiB a small block would wait in three buffers until others fill them. Each block
    # has more than these bytes, so that it passes at once, and large ones are not slower.
    "spark.buffer.size": str(BUFFER_BYTES),
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
_LOCAL: Final[dict[str, str]] = {
    # ICU's tables take two seconds of CPU at the first upper or lower case. Java's give the same but in
    # Turkish and its like; the language of executors on a cluster is their own.
    "spark.sql.icu.caseMappings.enabled": "false",
    "spark.driver.defaultJavaOptions": "-Duser.language=en",
    # A host name that resolves elsewhere must not keep a local session from starting.
    "spark.driver.host": "127.0.0.1",
    # A local executor is in the driver's process and is never lost alone. Heartbeats every 10 s, Spark's
    # default, take a fifth of what an idle `penstock run` takes.
    "spark.executor.heartbeatInterval": "60s",
    # Nor is it lost while the process is stopped for some minutes.
    "spark.storage.blockManagerHeartbeatTimeoutMs": "3600s",
}


def local_master(master: str) -> str:
    """Return a `local[n]` master with slots for all queries; any other master as it is.

    The tasks of a long batch hold their slots, which cost a local session nothing.
    """
    return master if _local_cores(master) is None else f"local[{_LOCAL_SLOTS}]"


def lanes(spark: SparkSession, master: str, queries: int) -> int:
    """Return how many tasks a long batch of one of so many queries may have, by the configured master.

    On a cluster the queries share its slots; where these are fewer, there is one a query.
    """
    cores = _local_cores(master)
    return max(1, spark.sparkContext.defaultParallelism // queries) if cores is None else cores


def batch_seconds(master: str) -> float:
    """Return how long a batch lasts: on a cluster others may wait for its slots."""
    return 60.0 if _local_cores(master) is None else 300.0


def warn_of_few_slots(spark: SparkSession, queries: int) -> None:
    """Log where not every query can have a lane at a time."""
    slots = spark.sparkContext.defaultParallelism
    if slots < queries:
        log.warning(
            "Spark has fewer slots than queries, one for each source and one for all syncs:"
            " they take turns of a minute",
            slots=slots, needed=queries,
        )  # fmt: skip


def _local_cores(master: str) -> int | None:
    match = re.fullmatch(r"local(?:\[(\*|\d+)\])?", master)
    if match is None:
        return None
    return (os.cpu_count() or 1) if match[1] == "*" else int(match[1] or 1)


def settings_of(master: str, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return all settings of a session for `master`; `conf` counts before Penstock's own."""
    merged = {**SETTINGS, **(_LOCAL if master.startswith("local") else {}), **(conf or {})}
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    merged["spark.driver.extraJavaOptions"] += f" -Dlog4j2.configurationFile={quiet}"
    return merged
