"""Spark's session, and the JVM that it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from penstock.core.errors import SparkError
from penstock.spark import launch
from penstock.spark.jvm import Jvm, variables
from penstock.spark.reasons import start_failure
from penstock.spark.settings import settings_of

_jvms: Final[list[Jvm]] = []


def create(
    master: str,
    conf: Mapping[str, str] | None = None,
    *,
    app: str = "penstock",
    record: Path | None = None,
    step: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
) -> SparkSession:
    """Return a session for `master` with Penstock's settings, and `conf` over them.

    Executors run this process's own Python, in a local session as forks of one process
    (`fork_server`). The JVM and the session are each started in the context
    that `step` returns; the JVM may have been started before (`launch.begin`). With `record` it
    writes an AOT cache there when it ends. Raises `SparkError`.
    """
    settings = settings_of(master, conf)
    spark_conf = SparkConf(loadDefaults=False).setAppName(app).setMaster(master)
    spark_conf.setAll(list(settings.items()))
    try:
        if SparkContext._gateway is None:
            with step("Java"):
                jvm = launch.take(master, settings, record)
                _jvms.append(jvm)
                gateway = jvm.connect()
                SparkContext._gateway, SparkContext._jvm = gateway, gateway.jvm
        with step("Spark"), variables(**_python(master)):
            made = SparkSession.builder.config(conf=spark_conf).getOrCreate()
            made.conf.get("spark.app.name")  # reads all settings, which are not checked before
        for jvm in _jvms if record is None else ():
            jvm.stderr.started()
    except (PySparkException, Py4JError, OSError) as error:
        failure = start_failure(error, last_errors())
        raise SparkError(failure.code, failure.cause, remedy=failure.remedy) from error
    return made


def is_running() -> bool:
    """Return whether this process has a session."""
    return SparkContext._active_spark_context is not None


def _python(master: str) -> dict[str, str]:
    """Return what has a local session start Python as its JVM does."""
    jvm = _jvms[-1] if _jvms and master.startswith("local") else None  # else the caller's own
    return {} if jvm is None or jvm.python is None else {"PYSPARK_PYTHON": jvm.python}


def last_errors() -> list[str]:
    """Return what Spark's processes wrote last to standard error, our own log left out."""
    return [line for jvm in _jvms[-1:] for line in jvm.stderr.last()]


def jvm_exit_code() -> int | None:
    """Return how Spark's JVM ended, or None while it runs."""
    process = getattr(SparkContext._gateway, "proc", None)
    try:
        # A connection breaks a moment before its process can be waited for.
        return None if process is None else process.poll()
    except OSError:
        return None
