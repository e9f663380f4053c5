"""What is reported of a query that Spark has ended: the cause, and no trace."""

from __future__ import annotations

import pytest

from penstock.spark.reasons import java_failure, query_failure, start_failure

HEAD = (
    "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted due to stage"
    " failure: Task 0 in stage 3.0 failed 1 times, most recent failure: Lost task 0.0 in stage 3.0"
    " (TID 5) (localhost executor driver): org.apache.spark.api.python.PythonException: "
)
TRACE = """\
Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 1, in main
    process()
  File "/x/penstock/spark/writer.py", line 94, in __call__
    total = _worker(self).run(unpack(batches))
            ^^^^^^^^^^^^^^^^^^
"""
TAIL = """

\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:601)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:
JVM stacktrace:
org.apache.spark.sql.streaming.StreamingQueryException
"""

SPARK_4 = """
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: shop 1795347671852881589 [id = 1fc9bfae, runId = 2894683c]
Current Committed Offsets: {x: {"lsn": "0/1B6FC50", "idx": 0}}
"""


@pytest.mark.parametrize("tail", [TAIL, SPARK_4, " SQLSTATE: 38000 SQLSTATE: XXKST"])
@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        ("asyncio.exceptions.CancelledError", "CancelledError"),
        ("ValueError: too many values", "ValueError: too many values"),
        (
            "penstock.core.delivery.SinkError: Nothing listens. Start it.",
            "Nothing listens. Start it.",
        ),
        ("pyo3_runtime.PanicException: called `unwrap()`", "PanicException: called `unwrap()`"),
        ("ValueError: first line\nsecond line", "ValueError: first line\nsecond line"),
        (f"ValueError: {'x' * 600} the end", f"ValueError: {'x' * 600} the end"),
    ],
)
def test_what_a_worker_raised(raised: str, cause: str, tail: str) -> None:
    failure = query_failure(RuntimeError(HEAD + TRACE + raised + tail))
    assert failure.code == "worker_failed"
    assert failure.cause == cause
    assert failure.remedy


def test_of_a_chain_the_last() -> None:
    chain = f"{TRACE}KeyError: 'a'\n\nThe above exception was the direct cause of:\n\n{TRACE}"
    assert query_failure(RuntimeError(f"{HEAD}{chain}TypeError: b{TAIL}")).cause == "TypeError: b"


def test_a_worker_that_is_gone() -> None:
    gone = "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"
    text = f"[STREAM_FAILED] Query terminated.\n\tat x\nCaused by: {gone}\n\tat y"
    failure = query_failure(RuntimeError(text))
    assert failure.code == "worker_lost"
    assert "SparkException: Python worker exited unexpectedly (crashed)" in failure.cause


@pytest.mark.parametrize("text", ["", "\n", "Traceback (most recent call last):\n  File x"])
def test_there_is_always_a_cause(text: str) -> None:
    failure = query_failure(RuntimeError(text))
    assert failure.cause
    assert failure.remedy


def test_a_failure_of_the_jvm() -> None:
    text = "[STREAM_FAILED] Query.\n\tat x\nCaused by: java.io.IOException: No space left\n\tat y"
    failure = query_failure(RuntimeError(text))
    assert (failure.code, failure.cause) == ("query", "IOException: No space left")
    assert query_failure(RuntimeError("[PLAN] no.")).cause == "[PLAN] no."


# -- what Spark 4.3 raises where something is wrong with Java, Python or a setting

LOAD = "An error occurred while calling o570.load.\n: org.apache.spark.SparkException: "
AT = "\n\tat org.apache.spark.api.python.PythonWorkerFactory.create(PythonWorkerFactory.scala:249)"
NO_MODULE = """\
[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted due to stage failure: \
Lost task 0.0 in stage 0.0 (TID 0) (localhost executor driver): org.apache.spark.SparkException: \

Error from python worker:
  /x/python: Error while finding module specification for 'a.b' \
(ModuleNotFoundError: No module named 'a')
PYTHONPATH was:
  /x/pyspark.zip
org.apache.spark.SparkException: EOFException occurred while reading the port number from a.b's stdout.
\tat org.apache.spark.errors.SparkCoreErrors$.eofException(SparkCoreErrors.scala:53)

Driver stacktrace: SQLSTATE: XXKST
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            f"{LOAD}EOFException occurred while reading the port number from pyspark.daemon's"
            f" stdout.{AT}",
            "SparkException: EOFException occurred while reading the port number from"
            " pyspark.daemon's stdout.",
        ),
        (
            f"{LOAD}Python worker failed to connect back.{AT}\nCaused by:"
            f" java.net.SocketTimeoutException: Accept timed out{AT}\n\t... 26 more\n",
            "SparkException: Python worker failed to connect back.",
        ),
        (
            f'{LOAD}x{AT}\nCaused by: java.io.IOException: Cannot run program "/no/python": error=2,'
            f" No such file or directory{AT}",
            'IOException: Cannot run program "/no/python": error=2, No such file or directory.',
        ),
        (
            NO_MODULE,
            "/x/python: Error while finding module specification for 'a.b' (ModuleNotFoundError:"
            " No module named 'a').",
        ),
    ],
)
def test_python_workers_that_do_not_start(text: str, cause: str) -> None:
    failure = query_failure(RuntimeError(text))
    assert failure.code == "no_worker"
    assert failure.cause == f"Spark's Python workers do not start: {cause}"
    assert "spark.conf" in failure.remedy


def test_what_a_worker_that_does_not_start_has_written_is_the_cause() -> None:
    text = f"{LOAD}Python worker failed to connect back.{AT}"
    wrote = ["a banner", "ImportError: libpq.so.5: cannot open shared object file"]
    failure = query_failure(RuntimeError(text), wrote)
    assert failure.cause.endswith(
        "connect back. ImportError: libpq.so.5: cannot open shared object file."
    )


def test_an_error_of_py4j_is_not_where_it_was_called() -> None:
    failure = query_failure(RuntimeError(f"{LOAD}[SOME_ERROR] It is so.{AT}"))
    assert failure.cause == "SparkException: [SOME_ERROR] It is so."


SETTING = """\
Error while instantiating 'org.apache.spark.sql.internal.SessionStateBuilder':

JVM stacktrace:
java.lang.IllegalArgumentException: Error while instantiating 'org.apache.spark.sql.internal.S':
\tat org.apache.spark.sql.classic.SparkSession$.instantiateSessionState(SparkSession.scala:1211)
Caused by: org.apache.spark.SparkIllegalArgumentException: [INVALID_CONF_VALUE.TYPE_MISMATCH] The value \
'many' in the config "spark.sql.shuffle.partitions" is invalid. It should be a/an 'int' value. \
SQLSTATE: 22022
\tat org.apache.spark.internal.config.ConfigHelpers$.configTypeMismatchError(ConfigBuilder.scala:119)
\t... 17 more
"""


def test_a_setting_that_spark_refuses() -> None:
    for failure in (start_failure(RuntimeError(SETTING)), query_failure(RuntimeError(SETTING))):
        assert "The value 'many' in the config \"spark.sql.shuffle.partitions\"" in failure.cause
        assert "Error while instantiating" not in failure.cause
        assert "Correct the settings below `spark`" in failure.remedy


def test_a_master_that_does_not_answer() -> None:
    stopped = "java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext."
    reason = "Application has been killed. Reason: All masters are unresponsive! Giving up."
    wrote = [f"2026-11-22T11:31:10.000 spark ERROR StandaloneSchedulerBackend: {reason}"]
    failure = start_failure(RuntimeError(stopped), wrote)
    assert failure.cause == f"Spark can't start: StandaloneSchedulerBackend: {reason}"


def test_a_jvm_that_does_not_start() -> None:
    wrote = [
        "Invalid initial heap size: -Xmslots", "Error: Could not create the Java Virtual Machine.",
        "Error: A fatal exception has occurred. Program will exit.",
    ]  # fmt: skip
    failure = java_failure(wrote)
    assert failure.cause == (
        "Spark's Java process does not start: Invalid initial heap size: -Xmslots."
    )
    assert "below `spark`" in failure.remedy
    assert "wrote no reason" in java_failure([]).cause
