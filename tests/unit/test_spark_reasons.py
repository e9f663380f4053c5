"""What is said of a query that Spark has ended: the cause, and no trace."""

from __future__ import annotations

import pytest

from penstock.spark.reasons import query_failure

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
        ("penstock.sinks.base.SinkError: Nothing listens. Start it.", "Nothing listens. Start it."),
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
