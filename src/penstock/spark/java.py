"""The Java that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.core.finding import Finding

OLDEST_JAVA: Final = 17
_JAVA_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_GET_JAVA: Final = (
    "Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless\n"
    "macOS: brew install openjdk@17\n"
    "then let JAVA_HOME name its folder, or PATH its `java`"
)


def inspect_java(environ: Mapping[str, str] = os.environ) -> Finding:
    """Look for the Java that Spark will run on: `JAVA_HOME`'s, or else the one on `PATH`."""
    home = environ.get("JAVA_HOME")
    if home:
        java, where = str(Path(home) / "bin" / "java"), f"JAVA_HOME={home}"
    else:
        java, where = shutil.which("java", path=environ.get("PATH")) or "", "PATH"
    if not java:
        return Finding("error", "java", f"there is none on {where}", _GET_JAVA)
    try:
        ran = subprocess.run(  # noqa: S603 - the user's own Java, as Spark starts it
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = error.strerror if isinstance(error, OSError) else "no answer in 30 s"
        return Finding("error", "java", f"{java} (from {where}) fails: {reason}", _GET_JAVA)
    version = _JAVA_VERSION.search(ran.stderr + ran.stdout)
    if ran.returncode != 0 or version is None:
        return Finding("error", "java", f"{java} (from {where}) fails", _GET_JAVA)
    if int(version[1]) < OLDEST_JAVA:
        message = f"{java} is Java {version[1]}, and Spark needs {OLDEST_JAVA} or later"
        return Finding("error", "java", message, _GET_JAVA)
    return Finding("ok", "java", f"Java {version[1]}: {java}")
