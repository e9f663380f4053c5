"""Spark's classes, made ready once and then mapped into every JVM that the tests start.

It is the AOT cache of `penstock warm`, in a cache folder of the tests' own: a start of Spark takes a
quarter of the CPU with it. Where it is missing, all works without. `python -m tests.spark_classes`
makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Final

from penstock.core import caches
from penstock.spark import aot
from penstock.spark.java import find_java
from penstock.spark.jvm import cache_key

from .pipeline import PATIENCE

FOLDER: Final = Path(sys.prefix) / "cache"
COMMAND: Final = (sys.executable, "-m", "penstock", "warm")


def share(folder: Path = FOLDER, environ: MutableMapping[str, str] = os.environ) -> bool:
    """Let every process use the cache in `folder`; return whether it is missing and can be made.

    No run makes it meanwhile: that would take the cores from whichever test is next.
    """
    environ["XDG_CACHE_HOME"] = str(folder)
    java = find_java(environ)
    key = None if java is None else cache_key(java)
    if key is None or aot.find(key) is not None:
        return False
    caches.folder().mkdir(parents=True, exist_ok=True)
    aot.log_path(key).write_text("The tests make it themselves.")
    return True


def start_writing() -> Callable[[], None]:
    """Make the cache in the background, and return what awaits it."""
    process = subprocess.Popen(
        COMMAND,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def wait() -> None:
        try:
            process.wait(2 * PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise

    return wait


if __name__ == "__main__" and share():
    subprocess.run(COMMAND, check=False)
