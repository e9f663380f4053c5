"""A JVM that is started ahead of the session that needs it, while this process still imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.spark.jvm import Jvm
from penstock.spark.settings import local_master, settings_of

if TYPE_CHECKING:
    from penstock.config.settings import Config

_begun: list[tuple[str, Mapping[str, str], Jvm]] = []


def begin(config: Config) -> None:
    """Start the JVM of a process that runs `config`; `take` hands it out.

    If the process ends before that, the JVM does too. `loaded` is to follow.
    """
    master = local_master(config.spark.master)
    settings = settings_of(master, config.spark.conf)
    _prepare(master)
    _begun.append((master, settings, Jvm(master, settings, fork=True)))


def loaded() -> None:
    """Begin what needs all of the process's imports: Spark's Python processes are forks of it."""
    _begun[-1][2].fork()


def take(master: str, settings: Mapping[str, str], record: Path | None = None) -> Jvm:
    """Return the JVM that was started for these settings, or one that starts now."""
    _prepare(master)
    if record is None and _begun and _begun[-1][:2] == (master, settings):
        return _begun.pop()[2]
    return Jvm(master, settings, record)


def _prepare(master: str) -> None:
    """Set what JVM and Python processes read from the environment."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        # A host name that resolves elsewhere must not keep a local session from starting.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
