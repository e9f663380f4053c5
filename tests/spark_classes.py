"""Spark's classes, verified once and then mapped into every JVM that the tests start.

Java calls it class data sharing; a start of Spark takes half of the CPU with it. `share` adds the
archive to `SPARK_SUBMIT_OPTS`, which Spark's launcher puts on the JVM's command line. Where the
archive is missing or fits another Java, the JVM ignores it. `python tests/spark_classes.py PATH`
writes one, from what a session, a streaming query and an expression load.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from importlib.metadata import version
from pathlib import Path

_OPTIONS = "SPARK_SUBMIT_OPTS"
# A JVM that can't map the archive must print nothing where a test reads the output.
_USE = "-Xshare:auto -Xlog:disable -Xlog:all=error:stderr -XX:SharedArchiveFile={path}"
_WRITE = "-Xlog:disable -XX:ArchiveClassesAtExit={path}"


def share(folder: Path, environ: MutableMapping[str, str] = os.environ) -> Path | None:
    """Add this Java's archive in `folder` to the environment, and return its path.

    None without Java, or where the environment has options of its own.
    """
    home = environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin") if home else environ.get("PATH"))
    if java is None or _OPTIONS in environ:
        return None
    real = Path(java).resolve()
    what = f"{real} {real.stat().st_mtime_ns} {sys.prefix} {version('pyspark')}"
    path = folder / f"{hashlib.sha256(what.encode()).hexdigest()[:16]}.jsa"
    environ[_OPTIONS] = _USE.format(path=path)
    return path


def start_writing(path: Path) -> Callable[[], None]:
    """Write the archive in the background, and return what awaits it; `path` exists once it is whole."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__)), str(path)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def wait() -> None:
        process.wait()

    return wait


def _write(path: Path) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    os.environ[_OPTIONS] = _WRITE.format(path=unfinished)
    from pyspark import SparkContext  # noqa: PLC0415 - the JVM reads the options when it starts

    from penstock.spark.session import create  # noqa: PLC0415 - imports pyspark
    from penstock.spark.warm import warm  # noqa: PLC0415 - imports pyspark

    spark = create("local[2]")
    warm(spark)
    spark.range(2).selectExpr("id", "cast(id AS string) AS t").filter("t LIKE '1%'").collect()
    spark.stop()
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.proc.stdin.close()
    gateway.proc.wait()
    unfinished.rename(path)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
