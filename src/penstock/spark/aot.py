"""What a JVM keeps of one start for the next ones: Java 25's AOT cache of Spark's classes.

It is a file in the user's cache folder, named by what it fits and by a digest of its content, so that
one that is half written, damaged or of another version is never given to a JVM. No start needs it.
`penstock.spark.aot_training` makes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import xxhash

from penstock.core.caches import folder
from penstock.spark.java import Java

OLDEST_JAVA: Final = 25
_AGAIN_SECONDS: Final = 3_600.0  # after a cache could not be made
_KEPT_SECONDS: Final = 30 * 86_400.0
_CHUNK: Final = 1 << 22
# A JVM that can't use the cache prints nothing: it only starts slower.
_QUIET: Final = ("-Xlog:disable", "-Xlog:all=error,aot*=off,cds*=off:stderr")


def key(java: Java, jars: list[Path], options: tuple[str, ...]) -> str:
    """Return what a cache must fit: the Java, Spark's JARs as they lie there, and our options."""
    found = [(str(jar), (stat := jar.stat()).st_size, stat.st_mtime_ns) for jar in jars]
    what = [str(java.program.resolve()), java.release, found, options]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:20]


def log_path(wanted: str) -> Path:
    """Return where the process writes that makes the cache of this key in the background."""
    return folder() / f"{wanted}.log"


def find(wanted: str) -> Path | None:
    """Return the cache of this key, if there is a whole one that this user or root has made."""
    with contextlib.suppress(OSError):
        for path in folder().glob(f"{wanted}-*.aot"):
            if path.stat().st_uid in (0, os.geteuid()) and path.stem == f"{wanted}-{digest(path)}":
                with contextlib.suppress(OSError):
                    os.utime(path)  # it is in use: see `tidy`
                return path
            discard(path)
    return None


def is_there(wanted: str) -> bool:
    """Return whether there is a cache of this key; it is not read."""
    return any(folder().glob(f"{wanted}-*.aot"))


def use(path: Path) -> list[str]:
    """Return the options by which a JVM uses a cache."""
    return [*_QUIET, f"-XX:AOTCache={path}"]


def record(path: Path) -> list[str]:
    """Return the options by which a JVM writes a cache when it ends."""
    return [*_QUIET, f"-XX:AOTCacheOutput={path}"]


def discard(path: Path) -> None:
    """Delete a cache that is of no use."""
    with contextlib.suppress(OSError):
        path.unlink()


def digest(path: Path) -> str:
    """Return the digest of a file's content."""
    made = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            made.update(chunk)
    return made.hexdigest()


def tidy() -> None:
    """Delete what was not used for a month, and what a process that was killed has left."""
    oldest = time.time() - _KEPT_SECONDS
    for path in folder().iterdir():
        with contextlib.suppress(OSError):
            stale = path.suffix in (".aot", ".log") and path.stat().st_mtime < oldest
            if stale or path.name.startswith("unfinished-"):
                path.unlink()


def make_in_background(wanted: str) -> bool:
    """Start a process that makes the cache of this key; return whether it does.

    It outlives this one by half a minute, at the lowest priority. None is started within an hour of
    an attempt that has failed.
    """
    log = log_path(wanted)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        last = log.stat() if log.exists() else None
        if last is not None and last.st_size and time.time() - last.st_mtime < _AGAIN_SECONDS:
            return False  # what is in it is why the last attempt has failed
        with log.open("wb") as output:
            subprocess.Popen(
                [sys.executable, "-m", "penstock", "warm", "--background"],
                cwd=log.parent, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
    except OSError:
        return False
    return True
