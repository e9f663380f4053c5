"""Makes the AOT cache: a session runs what a pipeline runs, and its JVM writes the cache as it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from penstock.core import caches
from penstock.core.errors import SparkError
from penstock.spark import aot
from penstock.spark.java import find_java
from penstock.spark.jvm import cache_key

_MASTER: Final = "local[2]"
_SECONDS: Final = 180.0  # for the JVM to write the cache, on a busy machine
_NO_CACHE: Final = "Nothing else depends on the cache; starts take as long as they did."


def make(*, background: bool = False) -> Path | None:
    """Return the cache for this Java and this Spark, made if it is missing; raises `SparkError`.

    In the background it is made at the lowest priority, and not where another process makes it: then
    None is returned.
    """
    java = find_java()
    key = None if java is None else cache_key(java)
    if key is None:
        what = "there is no Java" if java is None else f"{java.program} is Java {java.major}"
        raise SparkError(
            "no_cache", f"No cache can be made: {what}, and it takes Java {aot.OLDEST_JAVA}.",
            remedy=f"Unset JAVA_HOME, and Penstock takes the Java of its own. {_NO_CACHE}",
        )  # fmt: skip
    try:
        caches.folder().mkdir(parents=True, exist_ok=True)
        with _alone(wait=not background):
            if background:
                os.nice(19)
            return aot.find(key) or _train(key)
    except BlockingIOError:
        return None
    except OSError as error:
        raise SparkError(
            "no_cache", f"No cache can be made in {caches.folder()}: {error.strerror or error}.",
            remedy=f"Let XDG_CACHE_HOME name a folder that can be written. {_NO_CACHE}",
        ) from error  # fmt: skip


@contextlib.contextmanager
def _alone(*, wait: bool) -> Iterator[None]:
    """Let no other process make a cache in this folder; raises `BlockingIOError` or waits for one."""
    with (caches.folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _train(key: str) -> Path:
    from pyspark import SparkContext  # noqa: PLC0415 - half a second, which `find` does not need

    from penstock.spark.session import create  # noqa: PLC0415 - as above
    from penstock.spark.warm import warm  # noqa: PLC0415 - as above

    aot.tidy()
    unfinished = caches.folder() / f"unfinished-{os.getpid()}.aot"
    # Its folders are this process's own, and go with it.
    with tempfile.TemporaryDirectory(prefix="penstock-warm-", ignore_cleanup_errors=True) as folder:
        os.environ["SPARK_LOCAL_DIRS"] = folder
        try:
            spark = create(_MASTER, app="penstock warm", record=unfinished)
            gateway = SparkContext._gateway
            assert gateway is not None  # noqa: S101 - the session has one
            with _ended(gateway.proc):
                warm(spark)
                spark.stop()
                gateway.shutdown()
                gateway.proc.stdin.close()
                gateway.proc.wait(_SECONDS)
            if not unfinished.exists():
                raise SparkError(
                    "no_cache", f"Java ended with exit code {gateway.proc.returncode} and has written"
                    f" no cache to {caches.folder()}.",
                    remedy=f"See whether memory and disk suffice: it takes 1 GiB. {_NO_CACHE}",
                )  # fmt: skip
            return unfinished.rename(unfinished.with_name(f"{key}-{aot.digest(unfinished)}.aot"))
        except subprocess.TimeoutExpired:
            raise SparkError(
                "no_cache", f"Java has written no cache to {caches.folder()} in {_SECONDS:g} s.",
                remedy=f"Try again on a quieter machine. {_NO_CACHE}",
            ) from None  # fmt: skip
        finally:
            for path in caches.folder().glob(f"{unfinished.name}*"):
                aot.discard(path)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no JVM behind, nor the one that it starts to write the cache."""

    def end(*_: object) -> None:
        sys.exit(1)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            _kill_with_children(process.pid)
            process.wait()


def _kill_with_children(pid: int) -> None:
    """Kill a process and its children, which Linux lists; elsewhere they end by themselves."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(child), signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
